"""What every launch needs of the host: the device, its stream, the shape of the tensors in vectors."""

from __future__ import annotations

import functools

import torch
from cutlass import BFloat16, Float16, Float32
from loss_core.backend import UnsupportedInput

from ._schedule import LARGEST, VECTOR_BYTES, Machine, machine

DTYPES = {torch.float16: Float16, torch.bfloat16: BFloat16, torch.float32: Float32}


@functools.cache
def machine_of(index: int) -> Machine:
    """The machine of a CUDA device of this process."""
    properties = torch.cuda.get_device_properties(index)
    return machine((properties.major, properties.minor), properties.multi_processor_count, properties.L2_cache_size)


def _public_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# torch's own compiler uses the short way, which skips making a Stream object; the public one does where it is gone.
stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)


def require(tensor: torch.Tensor) -> None:
    """Refuse what the kernels do not do."""
    if tensor.dtype not in DTYPES:
        raise UnsupportedInput(f"cutedsl: float16, bfloat16 or float32 expected, got {tensor.dtype}")
    rows, cols = tensor.shape
    if rows > LARGEST or cols > LARGEST:
        raise UnsupportedInput(f"cutedsl: at most {LARGEST} rows and classes, got {rows} x {cols}")


def is_ragged(cols: int, *tensors: torch.Tensor) -> bool:
    """Whether a row of one of the tensors starts or ends inside a vector."""
    size = tensors[0].itemsize
    if cols * size % VECTOR_BYTES:
        return True
    for tensor in tensors:
        if (tensor.data_ptr() | tensor.stride(0) * size) % VECTOR_BYTES:
            return True
    return False
