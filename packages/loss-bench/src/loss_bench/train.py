"""A small language model trained with each backend from the same seed on the same batches.

What differs between the runs is the loss function alone, so the curves have to agree within rounding.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from loss_bench import files
from loss_bench.calls import BackendRow, Call, make_call
from loss_bench.cases import DTYPES, Case
from loss_bench.measure import seconds_between, stamp, synchronize
from loss_bench.model import LanguageModel
from loss_bench.processes import Tell
from loss_bench.results import CURVE_KEY, Report, device_name, finite, from_pairs, training_setup, with_others
from loss_bench.runner import BASELINE, Failure
from loss_bench.tokens import BYTE_VOCABULARY, encode, read_text

_SAVED_ROWS = 8192
# The rate grows over these steps: a start at full rate would turn rounding into other curves.
_WARMUP_STEPS = 20


@dataclass(frozen=True)
class Size:
    """Sizes of the model, the batches and the vocabulary (256: bytes) of a training run."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    dtype: str = "float32"
    vocabulary: int = BYTE_VOCABULARY


SIZES = {
    "small": Size(width=64, layers=2, heads=4, context=64, batch=16, steps=100),
    "gpu": Size(width=512, layers=8, heads=8, context=512, batch=32, steps=150, dtype="bfloat16"),
    "tokens": Size(width=512, layers=8, heads=8, context=512, batch=32, steps=200, dtype="bfloat16", vocabulary=32768),
}
"""``small`` is the default of a CPU, ``gpu`` that of a GPU; both work on bytes, ``tokens`` on a byte-pair encoding."""


@dataclass
class Curve:
    """What training with one backend gave.

    Attributes:
        backend: its name.
        device: name of the device.
        setup: what was trained, in words.
        status, reason: as in ``results.Row``; ``wrong`` if the curve left the reference's.
        losses: of every step.
        tokens_per_s: median over the steps.
        loss_ms: median time of the loss, forward and backward, in a step.
        peak_mib: of the allocator, all in all; GPU only.
        difference: the largest distance to the reference's curve, see ``compare_curves``.
        allowed: what that distance may be.
    """

    backend: str
    device: str
    setup: str
    status: str = "ok"
    reason: str = ""
    losses: list[float] = field(default_factory=list)
    tokens_per_s: float | None = None
    loss_ms: float | None = None
    peak_mib: float | None = None
    difference: float | None = None
    allowed: float | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """What is one curve, whenever it is found."""
        return tuple(getattr(self, name) for name in CURVE_KEY)

    def to_json(self) -> dict[str, Any]:
        """The curve as a JSON object; NaN and infinity become null."""
        return finite(asdict(self) | {"losses": [loss if math.isfinite(loss) else None for loss in self.losses]})

    @classmethod
    def from_json(cls, pairs: dict[str, Any]) -> Curve:
        """The curve of a JSON object; fields that are not known here are left out."""
        curve = from_pairs(cls, pairs)
        curve.losses = [math.nan if loss is None else float(loss) for loss in curve.losses]
        return curve


def check_length(text: Tensor, size: Size) -> None:
    """Raise for a text that is too short to draw sequences from.

    Raises:
        ValueError: with both lengths.
    """
    if len(text) <= size.context:
        raise ValueError(f"the text has {len(text)} tokens; more than the context of {size.context} are needed")


def batches(text: Tensor, size: Size, device: torch.device, seed: int) -> Tensor:
    """(steps, batch, context + 1) tokens, drawn from places that `seed` decides."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - size.context, (size.steps, size.batch, 1), generator=generator)
    return text[starts + torch.arange(size.context + 1)].to(device)


@dataclass(frozen=True)
class TrainTask:
    """One backend to train with.

    Attributes:
        backend: its name.
        size: what to train.
        seed: of the model and of the order of the data.
        text: see ``tokens.read_text``.
        save: where the last step's logits and labels go for ``run --logits``, unless another task was there before.
    """

    backend: str
    size: Size
    seed: int
    text: Path | None = None
    save: Path | None = None

    def __str__(self) -> str:
        return f"training with {self.backend}"


def train(task: TrainTask, device: torch.device, tell: Tell) -> Curve:
    """Train with the task's backend."""
    saved: dict[str, Tensor] = {}
    data = _data(task.text, task.size, device, task.seed)
    curve = train_one(task.backend, data, task.size, device, task.seed, saved, tell)
    if task.save is not None and not task.save.exists():
        files.write(task.save, save(saved))
    return curve


@lru_cache(maxsize=1)
def _data(text: Path | None, size: Size, device: torch.device, seed: int) -> Tensor:
    # A process trains with several backends on the same.
    return batches(encode(read_text(text), size.vocabulary), size, device, seed)


def failed_curve(task: TrainTask, device: torch.device, failure: Failure) -> Curve:
    """The curve of a backend that did not get to its end."""
    return Curve(task.backend, device_name(device), training_setup(asdict(task.size)), *failure)


def earlier_curves(
    earlier: Report, backends: Sequence[BackendRow], settings: Mapping[str, Any], device: str
) -> dict[str, Curve]:
    """The curves of `backends` that need not be found again, since `earlier` has them.

    Args:
        earlier: what is resumed.
        backends: as they are now.
        settings: of the new run: the fields of ``Size``, and what else decides the curves.
        device: name of the device.

    Raises:
        ValueError: if `earlier` is of another device, or has trained the same model in another way.
    """
    earlier.check_device(device)
    setup = training_setup(settings)
    for before in earlier.settings_with("steps"):
        if training_setup(before) == setup:
            _check_comparable(before, settings)
    versions = {pairs["name"]: pairs["version"] for pairs in earlier.backends}
    known = {curve.key: curve for curve in map(Curve.from_json, earlier.train)}
    found = {}
    for backend in backends:
        curve = known.get(Curve(backend.name, device, setup).key)
        if curve is not None and backend.stands(versions.get(backend.name, ""), curve.status):
            found[backend.name] = curve
    return found


def _check_comparable(before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name in ("seed", "text_sha256"):
        # Files from before the digest have none; what they name is all that is known of their text.
        place = name if name in before else "text"
        was, now = (Path(str(found.get(place))).name for found in (before, settings))
        if was != now:
            raise ValueError(f"the earlier curves are of {place} {was}, these of {place} {now}")


def curves_json(curves: Sequence[Curve], earlier: Report | None) -> list[dict[str, Any]]:
    """The `curves`, and behind them what an `earlier` report has of others."""
    found = [curve.to_json() for curve in curves]
    return found if earlier is None else with_others(found, earlier.train, CURVE_KEY)


def train_one(
    backend: str,
    data: Tensor,
    size: Size,
    device: torch.device,
    seed: int,
    saved: dict[str, Tensor],
    tell: Tell = lambda text, share: None,
) -> Curve:
    """Train one model; `saved` receives logits and labels of the last step."""
    torch.manual_seed(seed)
    model = LanguageModel(size.vocabulary, size.width, size.layers, size.heads, size.context).to(device)
    if size.dtype == "float64":
        model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    growing = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS))
    rows = size.batch * size.context
    call = make_call(Case("cross_entropy", rows, size.vocabulary, size.dtype), backend)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses, step_s, loss_s = [], [], []
    for step, batch in enumerate(data):
        synchronize(device)
        start = time.perf_counter()
        loss, seconds = _step(model, optimizer, call, batch, size, saved if step == len(data) - 1 else None)
        growing.step()
        synchronize(device)
        step_s.append(time.perf_counter() - start)
        loss_s.append(seconds())
        losses.append(float(loss))
        if step % 10 == 0:
            tell(f"training with {backend}: step {step}", step / len(data))
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    described = (device_name(device), training_setup(asdict(size)))
    return Curve(backend, *described, "ok", "", losses, rows / _settled(step_s), _settled(loss_s) * 1e3, peak)


def _settled(seconds: Sequence[float]) -> float:
    """The median without the first quarter, in which kernels are compiled and the allocator's pool grows."""
    return statistics.median(seconds[len(seconds) // 4 :])


def _step(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    call: Call,
    batch: Tensor,
    size: Size,
    saved: dict[str, Tensor] | None,
) -> tuple[Tensor, Callable[[], float]]:
    """One step; its loss, and a function that gives the seconds spent in the loss once the step is done."""
    tokens = batch.long()
    dtype = DTYPES[size.dtype]
    with torch.autocast(batch.device.type, dtype=dtype, enabled=dtype.itemsize < torch.float32.itemsize):
        logits = model(tokens[:, :-1])
    labels = tokens[:, 1:].reshape(-1)
    flat = logits.view(-1, logits.shape[-1])
    if saved is not None:
        # Before the loss: some backends write their gradient over the logits.
        saved |= {name: t[:_SAVED_ROWS].detach().cpu().clone() for name, t in (("logits", flat), ("labels", labels))}
    optimizer.zero_grad(set_to_none=True)
    # The graph is cut at the logits, so that the loss's own backward pass can be timed.
    leaf = flat.detach().requires_grad_()
    begin = stamp(batch.device)
    loss = call(leaf, labels)
    loss.backward()
    end = stamp(batch.device)
    flat.backward(leaf.grad)
    optimizer.step()
    return loss.detach(), partial(seconds_between, begin, end)


def compare_curves(curves: Sequence[Curve], size: Size) -> None:
    """Fill ``difference`` and ``allowed``, and mark as wrong what left the reference's curve.

    That is the curve of torch.nn.functional, or of the first that was trained without it, but never one with losses
    that are NaN or infinite: then all others would be wrong. What earlier calls have found is found anew.

    A loss in half precision is itself rounded, and training amplifies what the gradients' rounding starts: the
    allowance is two units of the dtype's rounding of the first loss, and grows with the square root of the steps.
    """
    trained = [curve for curve in curves if curve.losses]
    for curve in trained:
        curve.status, curve.reason, curve.difference, curve.allowed = "ok", "", None, None
        if not all(map(math.isfinite, curve.losses)):
            curve.status, curve.reason = "wrong", "a loss is NaN or infinite"
    finite = [curve for curve in trained if curve.status == "ok"]
    if not finite:
        return
    reference = next((curve for curve in finite if curve.backend == BASELINE), finite[0])
    eps = torch.finfo(DTYPES[size.dtype]).eps
    wanted = torch.tensor(reference.losses)
    allowed = max(2 * eps * float(wanted.max()), 2e-3) * max(1.0, (len(wanted) / 100) ** 0.5)
    for curve in finite:
        curve.difference = float((torch.tensor(curve.losses) - wanted).abs().max())
        curve.allowed = allowed
        if curve.difference > allowed:
            curve.status = "wrong"
            curve.reason = f"the curve is {curve.difference:.2g} away from {reference.backend}'s"
