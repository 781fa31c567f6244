"""What the kernels take for granted of the schedules, for every width and element size."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from loss_triton import schedules, softmax

WIDTHS = sorted({max(1, 2**power + offset) for power in range(21) for offset in (-1, 0, 1)})


def of_width(choose, classes, size, vector):
    if choose is schedules.options_schedule:
        return choose(classes, vector)
    return choose(classes, size, vector)


def gradient_schedule_h100(classes, size, vector):
    return schedules.gradient_schedule(classes, size, vector, 50 * 2**20)


def gradient_schedule_h200(classes, size, vector):
    return schedules.gradient_schedule(classes, size, vector, 60 * 2**20)


@pytest.mark.parametrize(
    "choose",
    [schedules.forward_schedule, gradient_schedule_h100, gradient_schedule_h200, schedules.options_schedule],
)
@pytest.mark.parametrize(("size", "vector"), [(2, 8), (2, 1), (4, 4), (4, 1)])
def test_blocks_end_within_the_row(choose, size, vector):
    """The blocks before the held part are read and written without a mask."""
    for classes in WIDTHS:
        lanes, block, hold, _ = of_width(choose, classes, size, vector)
        blocks = max(0, -(-(classes - hold) // block))
        assert blocks * block <= classes <= blocks * block + hold, (classes, block, hold)
        assert lanes in (32, 64, 128, 256, 512, 1024)
        for elements in (block, hold):
            assert elements % (lanes * vector) == 0
            assert elements & (elements - 1) == 0


@pytest.mark.parametrize("vector", [8, 4, 1])
def test_blocks_of_the_backward(vector):
    for classes in WIDTHS:
        lanes, block = schedules.backward_schedule(classes, vector)
        assert lanes in (32, 64, 128, 256, 512, 1024)
        assert block % (lanes * vector) == 0


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_softmax_blocks_end_within_the_row(direction, log, size):
    """A schedule that holds nothing has its rows whole in one block."""
    for classes in WIDTHS:
        rows, block, hold, warps, ahead = softmax._schedule(direction, classes, log, size)
        if hold == 0:
            assert classes <= block
            continue
        blocks = max(0, -(-(classes - hold) // block))
        assert blocks * block <= classes <= blocks * block + hold, (classes, block, hold)
        assert rows == 1
        assert block == hold or not ahead
        assert 32 * warps <= 1024
