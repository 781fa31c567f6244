"""The counters that the programs of one launch share. They are 0 before the launch, and the launch leaves them so."""

from __future__ import annotations

import torch
from torch import Tensor

# By device and stream: launches of one stream run one after the other.
_of_stream: dict[tuple[int, int], Tensor] = {}


def counters(device: torch.device) -> Tensor:
    """Two int64 zeros for the next launch on the current stream of `device`.

    A stream's launches share theirs, which saves each of them an allocation and a memset. A CUDA graph gets its own,
    for it may be replayed on any stream, beside anything else; so do devices without streams.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int64, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    words = _of_stream.get(key)
    if words is None:
        words = _of_stream[key] = torch.zeros(2, dtype=torch.int64, device=device)
    return words
