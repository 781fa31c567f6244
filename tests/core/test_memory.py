"""Memory for backends, on a CPU; what streams and graphs make of it is in ``gpu/test_device.py``."""

import pytest
import torch
from loss_core.memory import allocator, zeroed_words

CPU = torch.device("cpu")


@pytest.mark.parametrize(("shape", "strides"), [((), ()), ((0,), (1,)), ((1,), (1,)), ((7,), (1,)), ((3, 5), (5, 1))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_allocator(shape, strides, dtype):
    tensor = allocator(CPU)(shape, strides, dtype)
    assert (tensor.shape, tensor.dtype, tensor.device) == (shape, dtype, CPU)
    assert tensor.is_contiguous()
    assert not tensor.requires_grad


def test_words_without_streams_are_new():
    one, other = zeroed_words(3, CPU), zeroed_words(3, CPU)
    one.fill_(7)
    assert other.tolist() == [0, 0, 0]
    assert other.dtype == torch.int64
