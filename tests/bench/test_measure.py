"""Clocks and arithmetic, on fake time."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from loss_bench import measure
from loss_bench.cases import PASSES, Case, minimal_bytes
from loss_bench.inputs import random_inputs, sets_needed
from loss_bench.results import add_speedups
from loss_bench.runner import gb_per_second

CPU = torch.device("cpu")
CASE = Case("cross_entropy", 8, 50, "float32")


class FakeClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class SlowWork:
    """Work whose parts take known times and which writes down the order of events."""

    def __init__(self, clock: FakeClock, run: list[float]) -> None:
        self.clock, self.durations, self.events = clock, run, []

    def prepare(self, index: int) -> None:
        self.clock.seconds += 100
        self.events.append("prepare")

    def run(self, index: int) -> None:
        self.clock.seconds += self.durations[index]
        self.events.append("run")

    def finish(self, index: int) -> None:
        self.clock.seconds += 1000
        self.events.append("finish")


def flushing_timer(work: SlowWork) -> measure.CpuTimer:
    def flush() -> None:
        work.clock.seconds += 10
        work.events.append("flush")

    return measure.CpuTimer(work.clock, flush)


def test_timer_times_the_pass_alone():
    clock = FakeClock()
    work = SlowWork(clock, [0.001, 0.003, 0.002])
    assert flushing_timer(work).time(work, 3, 1) == pytest.approx([1.0, 3.0, 2.0])


def test_cache_is_flushed_between_preparation_and_each_timed_run():
    work = SlowWork(FakeClock(), [1.0] * 4)
    flushing_timer(work).time(work, 4, 2)
    assert work.events == ["prepare", "run", "finish"] * 2 + ["prepare", "flush", "run", "finish"] * 4


@pytest.mark.parametrize("pass_", PASSES)
def test_gradient_is_cleared_before_each_iteration(pass_):
    inputs = random_inputs(CASE, CPU, seed=0, sets=2)
    seen = []

    def call(logits, target):
        seen.append(logits.grad)
        return torch.nn.functional.cross_entropy(logits, target)

    work = measure.PassWork(call, inputs, pass_)
    work.inputs.input[0].grad = torch.ones_like(inputs.input[0])
    measure.CpuTimer(flush=lambda: None).time(work, 4, 1)
    assert len(seen) == 5
    assert all(grad is None for grad in seen)
    assert all(logits.grad is None for logits in inputs.input)


def test_no_grad_pass_gets_logits_that_need_no_gradient():
    seen = []
    inputs = random_inputs(CASE, CPU, seed=0, sets=2)
    work = measure.PassWork(lambda x, y: seen.append(x.requires_grad) or x.sum(), inputs, "no-grad")
    measure.CpuTimer(flush=lambda: None).time(work, 2, 0)
    assert seen == [False, False]


def test_inputs_are_rotated_and_overwritten_logits_restored():
    inputs = random_inputs(CASE, CPU, seed=0, sets=2)
    pristine = [(logits.detach().clone(),) for logits in inputs.input]
    seen = []

    def call(logits, target):
        seen.append([torch.equal(logits.detach(), p) for (p,) in pristine])
        loss = torch.nn.functional.cross_entropy(logits, target)
        logits.data.zero_()
        return loss

    measure.CpuTimer(flush=lambda: None).time(measure.PassWork(call, inputs, "forward", pristine), 4, 0)
    assert seen == [[True, False], [False, True]] * 2


class FakeGpu:
    """Stands for ``torch.cuda``: spins are written down, and an event knows when it was recorded."""

    def __init__(self, monkeypatch, cycles_per_s):
        self.events, self.seconds = [], 0.0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.spin)
        monkeypatch.setattr(measure, "_event", lambda: FakeEvent(self))
        self.cycles_per_s = cycles_per_s

    def spin(self, cycles):
        self.seconds += cycles / self.cycles_per_s
        self.events.append(("spin", cycles))


class FakeEvent:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = self.gpu.seconds
        self.gpu.events.append("event")

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


def test_gpu_spins_for_twice_the_host_time_between_the_flush_and_the_timed_part(monkeypatch):
    gpu = FakeGpu(monkeypatch, 1e9)
    timer = measure.CudaTimer(CPU, flush_bytes=1)
    timer._flush = lambda: gpu.events.append("flush")
    gpu.events.clear()
    host = FakeClock()
    monkeypatch.setattr(measure.time, "perf_counter", host)
    work = SlowWork(host, [9.0, 0.001])
    work.events = gpu.events
    timer.time(work, 1, 0)
    # Two calls find out what the host takes; the first one compiles.
    assert gpu.events[:6] == ["prepare", "run", "finish"] * 2
    flush, spin, *rest = gpu.events[7:]
    assert (flush, rest) == ("flush", ["event", "run", "event", "finish"])
    assert spin == ("spin", pytest.approx(2_000_000, rel=1e-6))


def test_summary_of_known_samples():
    summary = measure.summarize([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (summary.median, summary.p20, summary.p80, summary.samples) == (3.0, 1.8, 4.2, 5)
    even = measure.summarize([1.0, 2.0, 3.0, 10.0])
    assert even.median == 2.5


def test_interval_of_the_median_covers_it_in_about_95_of_100_cases():
    generator = torch.Generator().manual_seed(1)
    hits = 0
    for _ in range(400):
        summary = measure.summarize(torch.randn(41, generator=generator).tolist())
        hits += summary.low <= 0.0 <= summary.high
    assert 0.91 <= hits / 400 <= 0.995


@pytest.mark.parametrize("n", [*range(1, 70), 200, 999])
def test_the_interval_is_the_narrowest_of_the_samples_that_holds_the_median_in_95_of_100_cases(n):
    ways = [math.comb(n, below) for below in range(n + 1)]

    def coverage(outside):
        # The median is between the samples of these ranks if that many of n, each below it in half of the cases, are.
        return sum(ways[outside + 1 : n - outside]) / 2**n

    summary = measure.summarize([float(n - place) for place in range(n)])
    wide_enough = [outside for outside in range((n + 1) // 2) if coverage(outside) >= 0.95]
    assert bool(wide_enough) is (n >= 6)
    ends = (max(wide_enough) + 1.0, float(n - max(wide_enough))) if wide_enough else (None, None)
    assert (summary.low, summary.high) == ends


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="no samples"):
        measure.summarize([])


def test_planned_iterations_fill_the_budget_within_limits():
    assert measure.planned_iterations(10.0, 300.0, 6, 60) == 30
    assert measure.planned_iterations(1000.0, 300.0, 6, 60) == 6
    assert measure.planned_iterations(0.001, 300.0, 6, 60) == 60
    assert measure.planned_iterations(0.0, 300.0, 6, 60) == 60


@pytest.mark.parametrize(
    ("op", "pass_", "logits_passes"),
    [
        ("cross_entropy", "no-grad", 1),
        ("cross_entropy", "forward", 1),
        ("cross_entropy", "forward+backward", 2),
        ("cross_entropy", "backward", None),
        ("softmax", "forward", 2),
        ("softmax", "no-grad", 2),
        ("softmax", "backward", 3),
        ("log_softmax", "forward+backward", 5),
    ],
)
def test_bytes_of_a_pass(op, pass_, logits_passes):
    case = Case(op, 1000, 3000, "bfloat16")
    targets = 8 * 1000 if op == "cross_entropy" else 0
    expected = None if logits_passes is None else logits_passes * 1000 * 3000 * 2 + targets
    assert minimal_bytes(case, pass_) == expected


def test_gb_per_second():
    assert gb_per_second(4_000_000_000, 1.0) == pytest.approx(4000.0)


def test_host_time_is_the_median_over_batches_and_leaves_the_warm_up_out():
    clock = FakeClock()

    class Work(SlowWork):
        def run(self, index: int) -> None:
            # Batches of two calls; the first one compiles.
            batch = self.events.count("run") // 2
            self.clock.seconds += 1.0 if batch == 0 else batch * 1e-6
            self.events.append("run")

    works = {"one": Work(clock, []), "other": Work(clock, [])}
    for found in measure.host_microseconds(works, CPU, calls=2, batches=5, now=clock).values():
        assert found.median == pytest.approx(3.0)
        assert found.least == pytest.approx(1.0)


def test_hosts_are_timed_in_turns_and_one_that_raises_is_left_out():
    turns = []

    class Work(SlowWork):
        def __init__(self, name: str, seconds: float) -> None:
            super().__init__(clock, [])
            self.name, self.seconds = name, seconds

        def run(self, index: int) -> None:
            self.clock.seconds += self.seconds
            turns.append(self.name)
            if self.name == "broken":
                raise RuntimeError("not on this shape")

    clock = FakeClock()
    works = {name: Work(name, seconds) for name, seconds in (("quick", 1e-6), ("broken", 1e-6), ("slow", 0.2))}
    found = measure.host_microseconds(works, CPU, calls=1, batches=5, now=clock)
    assert turns[:5] == ["quick", "broken", "slow", "quick", "slow"]
    assert turns.count("broken") == 1
    # The warm-up, and batches until they have taken half a second.
    assert (turns.count("quick"), turns.count("slow")) == (6, 4)
    assert found.keys() == {"quick", "slow"}
    assert found["quick"].median == pytest.approx(1.0)


def test_no_garbage_is_collected_while_the_host_is_timed():
    seen = []

    class Work(SlowWork):
        def run(self, index: int) -> None:
            seen.append(gc.isenabled())

    measure.host_microseconds({"it": Work(FakeClock(), [])}, CPU, calls=2, batches=2)
    assert set(seen) == {False}
    assert gc.isenabled()


def test_sets_exceed_the_cache():
    small = Case("softmax", 64, 512, "float32")
    assert sets_needed(small, 300_000) * small.logits_bytes >= 2 * 300_000
    assert sets_needed(small, 1 << 40) == 8
    assert sets_needed(Case("softmax", 8192, 151936, "bfloat16"), 1 << 20) == 2


def test_speedup_refers_to_the_baseline_of_the_same_case_and_pass(make_row):
    rows = [
        make_row(backend="torch-nn", median_ms=6.0),
        make_row(backend="ours", median_ms=2.0),
        make_row(backend="ours", median_ms=2.0, pass_="forward"),
        make_row(backend="broken", status="wrong"),
    ]
    add_speedups(rows, "torch-nn")
    assert [row.speedup for row in rows] == [1.0, 3.0, None, None]


def test_copy_bandwidth_counts_reads_and_writes():
    class Timer:
        def time(self, work, iterations, warmup):
            return [1000.0] * iterations

        def estimate(self, work):
            return 1.0

    assert measure.copy_gb_s(CPU, Timer()) == pytest.approx(2 * (64 << 20) / 1e9)


def test_random_inputs_follow_the_seed_and_the_options():
    case = Case("cross_entropy", 1000, 10, "float16")
    first, second = (random_inputs(case, CPU, seed=3, sets=2) for _ in range(2))
    assert torch.equal(first.input[0], second.input[0])
    assert not torch.equal(first.input[0], first.input[1])
    assert not math.isnan(float(first.input[0].detach().float().sum()))
