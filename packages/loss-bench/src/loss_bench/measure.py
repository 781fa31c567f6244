"""Clocks, host time, peak memory and ceilings.

An iteration is prepared (gradients cleared, overwritten inputs restored, for the backward pass the forward pass run),
then a buffer larger than the last-level cache is written, and only then does the timed part start. On a GPU the clock
is a pair of CUDA events, the GPU is kept busy in front of the first of them until the host has enqueued the whole pass,
and nothing waits for the GPU until all iterations are in its queue.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from loss_bench.calls import Call
from loss_bench.inputs import Inputs

_CPU_CACHE_BYTES = 32 << 20
_MIB = 1 << 20
_UNSTEADY = 0.25
_HOST_LIMIT_S = 0.5
_SHORTEST_LEAD_S, _LONGEST_LEAD_S = 50e-6, 10e-3


class Work(Protocol):
    """One pass of one backend, cut into the part that is timed and the parts that are not."""

    def prepare(self, index: int) -> None:
        """Do what has to be done before iteration `index` but is no part of the pass."""
        ...

    def run(self, index: int) -> None:
        """The timed part."""
        ...

    def finish(self, index: int) -> None:
        """Let go of what the iteration made."""
        ...


@dataclass
class PassWork:
    """``Work`` of one pass over sets of inputs.

    Attributes:
        call: the backend's call.
        inputs: the sets to rotate through.
        pass_: one of ``cases.PASSES``.
        pristine: copies of the inputs (the logits, for most ops) to restore from before each iteration, for a backend
            that overwrites them.
    """

    call: Call
    inputs: Inputs
    pass_: str
    pristine: Sequence[Sequence[Tensor]] | None = None
    _results: dict[int, Tensor] = field(default_factory=dict)
    _detached: list[tuple[Tensor, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # An evaluation's inputs do not require grad, and some libraries look at that rather than at the grad mode.
        sets = range(len(self.inputs))
        self._detached = [tuple(leaf.detach() for leaf in self.inputs.leaves(which)) for which in sets]

    def prepare(self, index: int) -> None:
        """Clear the gradients, restore the inputs, run the forward half of a backward pass."""
        which = index % len(self.inputs)
        self._clear_gradients(which)
        if self.pristine is not None:
            restore(self.inputs.leaves(which), self.pristine[which])
        if self.pass_ == "backward":
            self._results[which] = self._forward(which)

    def run(self, index: int) -> None:
        """The pass itself."""
        which = index % len(self.inputs)
        if self.pass_ == "backward":
            self._backward(which, self._results[which])
        elif self.pass_ == "no-grad":
            with torch.no_grad():
                self._results[which] = self.call(*self._detached[which], self._target(which))
        elif self.pass_ == "forward":
            self._results[which] = self._forward(which)
        else:
            # The result is let go as a training loop does, whose next one takes its name.
            self._backward(which, self._forward(which))

    def finish(self, index: int) -> None:
        """Let go of the result and the gradients."""
        which = index % len(self.inputs)
        self._results.pop(which, None)
        self._clear_gradients(which)

    def _clear_gradients(self, which: int) -> None:
        # A gradient left over would turn the backward pass into an addition.
        for leaf in self.inputs.leaves(which):
            leaf.grad = None

    def _forward(self, which: int) -> Tensor:
        return self.call(*self.inputs.leaves(which), self._target(which))

    def _target(self, which: int) -> Tensor | None:
        return self.inputs.target[which] if self.inputs.target else None

    def _backward(self, which: int, result: Tensor) -> None:
        result.backward(self.inputs.grad_output[which] if self.inputs.grad_output else None)


def restore(leaves: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Give the memory of each leaf its value back."""
    with torch.no_grad():
        for leaf, value in zip(leaves, values, strict=True):
            leaf.copy_(value)


class GraphWork:
    """``Work`` that replays a CUDA graph of a pass: the GPU's own time, without the host's.

    The backward half alone is not captured: its graph would have to begin in the middle of autograd's.

    Args:
        work: the pass; its first set of inputs is used.

    Raises:
        RuntimeError: if the backend cannot be captured, most often because it waits for the GPU.
    """

    def __init__(self, work: PassWork) -> None:
        self._work = work
        wants_grad = work.pass_ != "no-grad"
        self._leaves = [leaf.detach().requires_grad_(wants_grad) for leaf in work.inputs.leaves(0)]
        self._target = work.inputs.target[0] if work.inputs.target else None
        self._outer = work.inputs.grad_output[0] if work.inputs.grad_output else None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._restore()
                self._body()
        torch.cuda.current_stream().wait_stream(stream)
        self._restore()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._results = self._body()

    def _restore(self) -> None:
        if self._work.pristine is not None:
            restore((leaf.detach() for leaf in self._leaves), self._work.pristine[0])

    def _body(self) -> object:
        if self._work.pass_ == "no-grad":
            with torch.no_grad():
                return self._work.call(*self._leaves, self._target)
        result = self._work.call(*self._leaves, self._target)
        if self._work.pass_ == "forward":
            return result
        # Not backward(): the node that accumulates into a leaf belongs to the stream on which it was made.
        return torch.autograd.grad(result, self._leaves, self._outer)

    def prepare(self, index: int) -> None:
        """Restore overwritten inputs."""
        self._restore()

    def run(self, index: int) -> None:
        """Replay."""
        self._graph.replay()

    def finish(self, index: int) -> None:
        """The results stay in the graph's own memory."""


class Timer(Protocol):
    """Times the iterations of a ``Work``."""

    def time(self, work: Work, iterations: int, warmup: int) -> list[float]:
        """Milliseconds of each of `iterations`, after `warmup` that are not timed."""
        ...

    def estimate(self, work: Work) -> float:
        """Milliseconds that one iteration takes in all, preparation and cache flush included; warms up."""
        ...


class CpuTimer:
    """Wall clock around each iteration.

    Args:
        now: seconds of a clock.
        flush: called before each iteration to throw the inputs out of the cache.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, flush: Callable[[], object] | None = None) -> None:
        self._now = now
        self._flush = flush or torch.zeros(_CPU_CACHE_BYTES, dtype=torch.int8).zero_

    def time(self, work: Work, iterations: int, warmup: int) -> list[float]:
        """Milliseconds of each iteration, after the warm-up."""
        for index in range(warmup):
            _once(work, index)
        return [self._sample(work, index) for index in range(iterations)]

    def _sample(self, work: Work, index: int) -> float:
        work.prepare(index)
        self._flush()
        start = self._now()
        work.run(index)
        elapsed = self._now() - start
        work.finish(index)
        return elapsed * 1e3

    def estimate(self, work: Work) -> float:
        """Milliseconds of one iteration in all, after one that warms up."""
        _once(work, 0)
        start = self._now()
        self._sample(work, 1)
        return (self._now() - start) * 1e3


class CudaTimer:
    """CUDA events around each iteration, on the current stream.

    In front of the first event the GPU spins for twice as long as the host needs for the pass. So the whole pass is in
    the queue when the GPU comes to it, and what is measured holds no time in which the GPU waited for the host.

    Args:
        device: the GPU.
        flush_bytes: size of the buffer that is written before each iteration; by default four times the L2 cache.
    """

    def __init__(self, device: torch.device, flush_bytes: int | None = None) -> None:
        self._device = device
        size = flush_bytes or 4 * l2_bytes(device)
        self._flush = torch.empty(size, dtype=torch.int8, device=device).zero_
        self._cycles_per_s = _spin_cycles_per_s(device)

    def time(self, work: Work, iterations: int, warmup: int) -> list[float]:
        """Milliseconds of each iteration, after the warm-up."""
        for index in range(warmup):
            _once(work, index)
        return self._samples(work, iterations, self._lead_cycles(work))

    def _samples(self, work: Work, iterations: int, lead: int) -> list[float]:
        pairs = [(_event(), _event()) for _ in range(iterations)]
        for index, (start, end) in enumerate(pairs):
            work.prepare(index)
            self._flush()
            torch.cuda._sleep(lead)
            start.record()
            work.run(index)
            end.record()
            work.finish(index)
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) for start, end in pairs]

    def _lead_cycles(self, work: Work) -> int:
        """How long the GPU has to be kept busy while the host enqueues the pass."""
        taken = []
        for index in range(2):
            work.prepare(index)
            torch.cuda.synchronize(self._device)
            start = time.perf_counter()
            work.run(index)
            taken.append(time.perf_counter() - start)
            work.finish(index)
        # The first call may have compiled; one that waits for the GPU itself cannot be helped by a longer lead.
        return int(min(_LONGEST_LEAD_S, max(_SHORTEST_LEAD_S, 2 * min(taken))) * self._cycles_per_s)

    def estimate(self, work: Work) -> float:
        """Milliseconds of one iteration in all, after one that warms up."""
        _once(work, 0)
        lead = self._lead_cycles(work)
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        self._samples(work, 2, lead)
        return (time.perf_counter() - start) * 1e3 / 2


def _once(work: Work, index: int) -> None:
    work.prepare(index)
    work.run(index)
    work.finish(index)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _spin_cycles_per_s(device: torch.device) -> float:
    """Cycles that ``torch.cuda._sleep`` counts in a second, once the clock has gone up."""
    cycles = 10_000_000
    start, end = _event(), _event()
    torch.cuda._sleep(4 * cycles)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize(device)
    return cycles / (start.elapsed_time(end) * 1e-3)


def make_timer(device: torch.device) -> Timer:
    """The timer for `device`."""
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def l2_bytes(device: torch.device) -> int:
    """Size of the last-level cache, or a guess that is large enough."""
    if device.type != "cuda":
        return _CPU_CACHE_BYTES
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * _MIB


def planned_iterations(estimate_ms: float, budget_ms: float, least: int, most: int) -> int:
    """How many iterations of `estimate_ms` fill `budget_ms`, within `least` and `most`."""
    if estimate_ms <= 0:
        return most
    return max(least, min(most, int(budget_ms / estimate_ms)))


@dataclass(frozen=True)
class Summary:
    """What is kept of the samples, in their unit.

    Attributes:
        median: the middle sample.
        p20, p80: the percentiles between which three in five samples lie.
        low, high: a 95% interval of the median, from the order of the samples alone; None if there are too few of them.
        samples: how many there were.
    """

    median: float
    p20: float
    p80: float
    low: float | None
    high: float | None
    samples: int

    @property
    def unsteady(self) -> bool:
        """Whether the samples are spread so widely that the median says little."""
        return self.p80 - self.p20 > _UNSTEADY * self.median


def summarize(samples: Sequence[float]) -> Summary:
    """Median, percentiles and the median's interval.

    Raises:
        ValueError: without samples.
    """
    if not samples:
        raise ValueError("no samples to summarise")
    ordered = sorted(samples)
    n, cut = len(ordered), _samples_outside(len(ordered))
    low, high = (None, None) if cut is None else (ordered[cut], ordered[n - 1 - cut])
    return Summary(statistics.median(ordered), percentile(ordered, 20), percentile(ordered, 80), low, high, n)


def _samples_outside(n: int) -> int | None:
    """How many of `n` samples lie on either side of a 95% interval of the median; None if all of them are too few.

    The number of samples below the median is binomial with p = 1/2: each tail may hold 2.5%.
    """
    outside, ways, tail = None, 1, 0
    for k in range(n):
        tail += ways
        if 40 * tail > 2**n:
            break
        outside, ways = k, ways * (n - k) // (k + 1)
    return outside


LEAST_SAMPLES = next(n for n in itertools.count(1) if _samples_outside(n) is not None)
"""Fewer have no 95% interval of the median."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of sorted numbers, with straight lines between them."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class HostTime:
    """What the host spends on one call, in microseconds.

    Attributes:
        median: over the batches.
        least: of the batches: what is left when nobody else has the processor.
    """

    median: float
    least: float


def host_microseconds(
    works: Mapping[str, Work],
    device: torch.device,
    *,
    calls: int,
    batches: int = 25,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, HostTime]:
    """Microseconds that the host spends on one call of each, while the GPU works behind it.

    A batch is `calls` calls that are made without waiting, as many as there are sets of inputs; the GPU is waited for
    between batches only. The works take turns, a batch each, since a host's speed changes by half from one second to
    the next. Slow ones have fewer batches, and one that raises is left out. On a CPU the arithmetic is part of it.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    collecting = gc.isenabled()
    gc.disable()
    try:
        # The first batch warms up.
        for batch in range(batches + 1):
            for name, samples in list(taken.items()):
                if batch < 2 or sum(samples[1:]) * calls < _HOST_LIMIT_S * 1e6:
                    try:
                        samples.append(_host_batch(works[name], device, calls, now))
                    except Exception:
                        del taken[name]
    finally:
        if collecting:
            gc.enable()
    return {name: HostTime(statistics.median(samples[1:]), min(samples[1:])) for name, samples in taken.items()}


def _host_batch(work: Work, device: torch.device, calls: int, now: Callable[[], float]) -> float:
    """Microseconds of the host for one call, of one batch of them."""
    for index in range(calls):
        work.prepare(index)
    synchronize(device)
    start = now()
    for index in range(calls):
        work.run(index)
    microseconds = (now() - start) * 1e6 / calls
    for index in range(calls):
        work.finish(index)
    synchronize(device)
    return microseconds


def peak_mib(work: Work, device: torch.device) -> float | None:
    """MiB that the pass needs at its worst beyond its inputs, gradients and saved tensors included; GPU only."""
    if device.type != "cuda":
        return None
    # What is collected during the pass would be missing from it.
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    work.prepare(0)
    # What the forward half took for a moment is no part of a backward pass; what it saved is.
    torch.cuda.reset_peak_memory_stats(device)
    work.run(0)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    work.finish(0)
    return (peak - before) / _MIB


def copy_gb_s(device: torch.device, timer: Timer) -> float:
    """Bandwidth of a copy within `device`'s memory, bytes read plus bytes written, in GB/s."""
    size = 64 * _MIB
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        size = min(1024 * _MIB, free // 8)
    source = torch.empty(size, dtype=torch.int8, device=device).random_()
    work = _CopyWork(source, torch.empty_like(source))
    return 2 * size / (summarize(timer.time(work, 20, 5)).median * 1e-3) / 1e9


def matmul_tflop_s(device: torch.device, timer: Timer, dtype: torch.dtype = torch.bfloat16) -> float:
    """Rate of a square matrix product on random data, in 10**12 operations a second: 8192 wide, 1024 on a CPU."""
    size, iterations, warmup = (1024, 5, 1) if device.type == "cpu" else (8192, 10, 3)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    median = summarize(timer.time(_MatmulWork(left, right, torch.empty_like(left)), iterations, warmup)).median
    return 2 * size**3 / (median * 1e-3) / 1e12


@dataclass
class _MatmulWork:
    left: Tensor
    right: Tensor
    out: Tensor

    def prepare(self, index: int) -> None: ...

    def run(self, index: int) -> None:
        torch.matmul(self.left, self.right, out=self.out)

    def finish(self, index: int) -> None: ...


@dataclass
class _CopyWork:
    source: Tensor
    destination: Tensor

    def prepare(self, index: int) -> None: ...

    def run(self, index: int) -> None:
        self.destination.copy_(self.source)

    def finish(self, index: int) -> None: ...


def stamp(device: torch.device) -> torch.cuda.Event | float:
    """A moment of the device's time: an event on a GPU, a clock's seconds on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = _event()
    event.record()
    return event


def seconds_between(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Seconds between two stamps of one device that has reached the second."""
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    return begin.elapsed_time(end) * 1e-3


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def poison(device: torch.device, size: int) -> None:
    """Leave NaN in memory that the allocator will hand out next, so that an element nobody writes shows."""
    if device.type == "cuda":
        torch.full((max(1, size // 4),), float("nan"), device=device)
