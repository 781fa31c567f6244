"""Sums over rows in the launch that finds out what is summed: every value, every number of slices, words left at 0."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl
from loss_triton import total
from loss_triton.total import publish, sum_of_slices, sum_slice, words_of, workspace_words
from support import devices

pytestmark = pytest.mark.skipif(
    bool(devices.unavailable_reason("triton")), reason=f"triton: {devices.unavailable_reason('triton')}"
)

LANES = tl.constexpr(32)


@triton.jit
def sum_two_values_kernel(values_ptr, others_ptr, live_ptr, workspace_ptr, sums_ptr, counts_ptr, rows):
    row = tl.program_id(0)
    live = tl.load(live_ptr + row) != 0
    publish(words_of(workspace_ptr, rows, 0), row, tl.load(values_ptr + row), live)
    publish(words_of(workspace_ptr, rows, 1), row, tl.load(others_ptr + row), live)
    sum_slice(words_of(workspace_ptr, rows, 0), row, rows, LANES)
    sum_slice(words_of(workspace_ptr, rows, 1), row, rows, LANES)
    if row == rows - 1:
        first, count = sum_of_slices(words_of(workspace_ptr, rows, 0), rows)
        tl.store(sums_ptr, first)
        tl.store(counts_ptr, count)
        second, count = sum_of_slices(words_of(workspace_ptr, rows, 1), rows)
        tl.store(sums_ptr + 1, second)
        tl.store(counts_ptr + 1, count)


def sums_and_counts(values, others, live, device):
    """As the kernel has them, after a look at the words that it leaves."""
    rows = len(values)
    workspace = torch.zeros(workspace_words(rows, 2), dtype=torch.int64, device=device)
    sums = torch.full((2,), math.nan, device=device)
    counts = torch.full((2,), -1, dtype=torch.int64, device=device)
    arguments = (tensor.to(device) for tensor in (values, others, live.to(torch.int32)))
    sum_two_values_kernel[(rows,)](*arguments, workspace, sums, counts, rows, num_warps=1)
    assert not workspace.any()
    return sums.cpu(), counts.cpu()


# A slice that is not full, as many rows as one has, one row more; and rows that do not fill vectors. Where programs run
# at the same time also many slices.
@pytest.mark.parametrize("rows", [1, 2, 5, 256, 257])
def test_sums(rows, device):
    for more in (0,) if device == "cpu" else (0, 1000, 50000):
        values, others = torch.randn(rows + more), 100 * torch.rand(rows + more)
        live = torch.rand(rows + more) > 0.3
        sums, counts = sums_and_counts(values, others, live, device)
        for actual, summed in zip(sums, (values, others), strict=True):
            torch.testing.assert_close(actual.double(), summed[live].double().sum(), atol=1e-3, rtol=1e-6)
        assert counts.tolist() == [int(live.sum())] * 2
        if more:
            again, _ = sums_and_counts(values, others, live, device)
            assert torch.equal(sums, again)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(0.0, 0.0), (-0.0, 0.0), (math.inf, math.inf), (-math.inf, -math.inf), (math.nan, math.nan)],
)  # fmt: skip
def test_values_like_none(value, wanted, device):
    """No value is taken for a word that is not there yet, or for that of an ignored row."""
    rows = 10
    sums, counts = sums_and_counts(torch.full((rows,), value), torch.zeros(rows), torch.ones(rows), device)
    torch.testing.assert_close(sums[0], torch.tensor(wanted), equal_nan=True)
    assert counts.tolist() == [rows, rows]


def test_all_rows_ignored(device):
    sums, counts = sums_and_counts(torch.randn(10), torch.full((10,), math.nan), torch.zeros(10), device)
    assert sums.tolist() == [0.0, 0.0]
    assert counts.tolist() == [0, 0]


def test_a_slice_ends_before_the_row_of_its_program():
    """For every number of rows: nobody waits for a program that starts later than itself."""
    most, least = total._SLICES.value, total._LEAST_SLICE.value
    for rows in [*range(1, 3000), 2**14 - 1, 2**14, 2**14 + 1, 10**5 + 3, 2**20]:
        size = max(4 * math.ceil(math.ceil(rows / 4) / most), least)
        slices = math.ceil(rows / size)
        assert slices <= most
        for number in range(slices):
            assert min(size * (number + 1), rows) - 1 <= rows - slices + number, (rows, number)
