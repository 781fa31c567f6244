"""The forward's arithmetic of a row, run in Python by one thread in float32, against float64."""

from types import SimpleNamespace

import pytest

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

import cutlass
import numpy as np
from cutedsl.plain import plain
from loss_cutedsl import _cross_entropy_forward, _cross_entropy_rows, _device, _schedule

float32 = np.float32

IN_PYTHON = {
    "Float32": float32,
    "Int32": int,
    "Int64": int,
    "cutlass": SimpleNamespace(
        const_expr=bool, range_constexpr=range, range=lambda *bounds, unroll: range(*map(int, bounds))
    ),
    "exp2": np.exp2,
    "log2": np.log2,
    "maximum": np.fmax,
    "divide": lambda a, b: a / b,
    "fma": lambda a, b, c: float32(np.float64(a) * np.float64(b) + np.float64(c)),
    "tanh": lambda u: float32(np.tanh(np.float64(u))),
    "select_below": lambda index, bound, inside, outside: inside if 0 <= index < bound else outside,
    "moderate": lambda x: x if abs(x) < 2.0**64 else float32(0.0),
}


class Model(_cross_entropy_forward.CrossEntropyForward):
    """A row's sums and loss; the kernel's methods on a row that lies in a list."""

    sum_held = plain(_cross_entropy_forward.CrossEntropyForward.sum_held)
    absorb = plain(_cross_entropy_forward.CrossEntropyForward.absorb)

    def __init__(self, **facts):
        super().__init__(
            cutlass.Float32, _schedule.Schedule(1, 1, 1, 1, 2, 1), False, target_bits=64, gradient=True, scalar=True,
            stats=False, shard=False, **facts,
        )  # fmt: skip

    def reduce_row(self, s_scratch, parity, thread, rank, power, highest, total, sums, best):
        return highest, total, sums, best

    def first_column(self, first, phase, cols):
        return 0

    def or_nan(self, facts, target, value):
        return value


def loss_of_row(monkeypatch, x, target, weight=None, smoothing=0.0, z_loss=0.0, scale=1.0, softcap=None):
    """As the kernel has it."""
    padded = np.append(x, np.full(-len(x) % 8, -np.inf)).astype(float32)
    in_python = {
        **IN_PYTHON,
        "load_shared": lambda s_address: s_address // _schedule.VECTOR_BYTES,
        "unpack": lambda dtype, vector: list(padded[4 * vector : 4 * vector + 4]),
        "load_float_below": lambda g_address, index, bound: weight[index] if 0 <= index < bound else float32(0.0),
    }
    for module in (_device, _cross_entropy_rows, _cross_entropy_forward):
        for name, value in in_python.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    logits = "softcap" if softcap else "linear" if scale > 0 else "scaled"
    model = Model(weighted=weight is not None, smoothing=smoothing != 0, logits=logits)
    facts = model.row_facts(
        len(x), len(padded) // 8, 0, 0, 0, 0, 0, 0, len(x), float32(smoothing), float32(z_loss), float32(scale),
        float32(softcap or 1.0),
    )  # fmt: skip
    x_y, w_y = float32(x[target]), float32(1.0) if weight is None else weight[target]
    with np.errstate(all="ignore"):
        sums = model.sum_held(facts, 0, 0, model.anchor(facts, x_y, target))
        highest, total, x_sum, w_sum, *_ = model.finish(facts, 0, *sums)
        return model.row_loss(facts, target, target, x_y, w_y, highest, total, x_sum, w_sum)[0]


def exact_loss(x, target, weight=None, smoothing=0.0, z_loss=0.0, scale=1.0, softcap=None):
    with np.errstate(all="ignore"):
        x = np.float64(scale) * x.astype(np.float64)
        x = softcap * np.tanh(x / softcap) if softcap else x
        weight = np.ones(len(x)) if weight is None else weight.astype(np.float64)
        lse = x.max() + np.log(np.exp(x - x.max()).sum())
        each = weight * (lse - x)
        return (1 - smoothing) * each[target] + smoothing / len(x) * each.sum() + z_loss * lse**2


OPTIONS = {
    "plain": {},
    "smoothing": {"smoothing": 0.1},
    "much smoothing": {"smoothing": 0.9},
    "smoothing and scale": {"smoothing": 0.1, "scale": 0.5},
    "smoothing and negative scale": {"smoothing": 0.1, "scale": -0.5},
    "smoothing and softcap": {"smoothing": 0.1, "softcap": 30.0},
    "z_loss": {"z_loss": 1e-4},
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shift", [0.0, -1e4, 1e4, 1e6])
def test_losses_keep_their_digits_far_from_zero(monkeypatch, shift, options, weighted):
    random = np.random.default_rng(1)
    for classes in (5, 40, 1003):
        x = (2 * random.standard_normal(classes) + shift).astype(float32)
        weight = random.random(classes).astype(float32) if weighted else None
        for target in (0, classes // 2, int(x.argmin()), int(x.argmax())):
            got = loss_of_row(monkeypatch, x, target, weight, **options)
            assert got == pytest.approx(exact_loss(x, target, weight, **options), rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("of_target", [-np.inf, -1e38, -1e30, -65504.0, -1e4, 0.0, 1e4, 1e30])
@pytest.mark.parametrize("of_another", [-np.inf, -1e38, -1e4, 0.0])
def test_smoothing_over_masked_classes(monkeypatch, of_target, of_another):
    x = np.linspace(-1, 1, 21).astype(float32)
    x[3], x[7] = of_target, of_another
    got, wanted = loss_of_row(monkeypatch, x, 3, smoothing=0.1), exact_loss(x, 3, smoothing=0.1)
    assert got == pytest.approx(wanted, rel=2e-5)
