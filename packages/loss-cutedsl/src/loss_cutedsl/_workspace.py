"""The few words of device memory that a kernel needs to be 0 at its start and leaves at 0.

One workspace serves all launches of a stream, since they run one after another.
"""

from __future__ import annotations

import threading

import torch

from ._cross_entropy_forward import workspace_words

# Blocks that a kept workspace is for; a grid of more gets one of its own.
KEPT_BLOCKS = 4096

# The handle that stands for another stream in each thread.
PER_THREAD_STREAM = 2

_kept: dict[tuple[int, int], torch.Tensor] = {}


def workspace(index: int, stream: int, blocks: int) -> torch.Tensor:
    """A workspace for a launch of that many blocks on the current stream, whose address is ``stream``.

    While a CUDA graph is captured it is a new one, zeroed by the graph: the graph may run on other streams, beside
    launches of this one.
    """
    if blocks > KEPT_BLOCKS or torch.cuda.is_current_stream_capturing():
        return _zeros(index, blocks)
    found = _kept.get((index, stream))
    if found is not None:
        return found
    if stream == PER_THREAD_STREAM:
        return _zeros(index, blocks)
    return _kept.setdefault((index, stream), _lasting_zeros(index))


def _zeros(index: int, blocks: int) -> torch.Tensor:
    return torch.zeros(workspace_words(blocks), dtype=torch.int32, device=torch.device("cuda", index))


def _lasting_zeros(index: int) -> torch.Tensor:
    """A workspace that lives as long as the process, and that the current stream may use.

    A thread of its own allocates it. The caller's thread may be allocating from a memory pool that is later reset
    with all that lies in it, as torch.compile's CUDA graphs do while they warm up.
    """
    result = []

    def allocate():
        with torch.cuda.device(index):
            result.append((_zeros(index, KEPT_BLOCKS), torch.cuda.current_stream(index).record_event()))

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    tensor, zeroed = result[0]
    torch.cuda.current_stream(index).wait_event(zeroed)
    return tensor
