"""Device memory for backends: small results, and the words that a kernel needs to be 0 at its start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""(shape, strides, dtype) -> a tensor that nothing has been written to."""

# What torch.compile's own code allocates with: a microsecond where torch.empty takes two to four.
_empty_cuda: Allocate | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)

# torch.cuda.is_current_stream_capturing, without its Python.
_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

KEPT_WORDS = 1 << 18
"""Words of the workspace that is kept for a stream; a launch that needs more gets memory of its own."""

# The handle that stands for another stream in each thread.
_PER_THREAD_STREAM = 2

_kept: dict[tuple[int, int], Tensor] = {}


@cache
def allocator(device: torch.device) -> Allocate:
    """What allocates on `device`, which has to be the current one of its type when it is called."""
    if _empty_cuda is not None and device.type == "cuda":
        return _empty_cuda
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def zeroed_words(words: int, device: torch.device, stream: int | None = None) -> Tensor:
    """At least that many int64 zeros on `device`, for the next launch on its current stream, which leaves them so.

    Launches of one stream run one after the other, so one workspace serves all of them, of all backends. While a CUDA
    graph is captured the words are new, zeroed by the graph: it may run on other streams, beside launches of this
    one. On devices other than CUDA they are always new.

    Args:
        words: how many.
        device: with its index.
        stream: the address of the current stream, where the caller knows it.
    """
    if device.type != "cuda" or words > KEPT_WORDS or _is_capturing():
        return torch.zeros(words, dtype=torch.int64, device=device)
    index = device.index
    if stream is None:
        stream = torch._C._cuda_getCurrentRawStream(index)
    found = _kept.get((index, stream))
    if found is not None:
        return found
    if stream == _PER_THREAD_STREAM:
        return torch.zeros(words, dtype=torch.int64, device=device)
    return _kept.setdefault((index, stream), _lasting_zeros(device))


def _lasting_zeros(device: torch.device) -> Tensor:
    """A workspace that lives as long as the process, and that the current stream may use.

    A thread of its own allocates it. The caller's thread may be allocating from a memory pool that is later reset
    with all that lies in it, as torch.compile's CUDA graphs do while they warm up.
    """
    made: list[tuple[Tensor, torch.cuda.Event]] = []

    def allocate() -> None:
        with torch.cuda.device(device):
            words = torch.zeros(KEPT_WORDS, dtype=torch.int64, device=device)
            made.append((words, torch.cuda.current_stream(device).record_event()))

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    words, zeroed = made[0]
    torch.cuda.current_stream(device).wait_event(zeroed)
    return words
