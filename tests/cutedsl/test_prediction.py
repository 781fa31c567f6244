"""The prediction is torch's argmax whatever the row holds: NaN before inf, the first of equals, 0.0 equal to -0.0.

The forward's search, run in Python thread by thread, with what PTX says of its comparisons.
"""

import pytest

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

import cutlass
import numpy as np
import torch
from cutedsl.plain import plain
from cutedsl.ptx import ptx
from cutedsl.test_arithmetic import IN_PYTHON
from loss_cutedsl import _cross_entropy_forward, _cross_entropy_rows, _device, _schedule

INF, NAN = float("inf"), float("nan")
# Of a row of -1: what lies where, as a share of the row; or all of it.
ROWS = [
    {0.2: INF, 0.8: NAN},
    {0.2: NAN, 0.8: INF},
    {0.3: NAN, 0.9: NAN},
    {0.3: -NAN, 0.9: NAN},
    {0.9: NAN},
    {0.0: NAN, 0.5: 7.0},
    {0.1: INF, 0.6: INF},
    {0.2: -0.0, 0.7: 0.0},
    {0.2: 0.0, 0.7: -0.0},
    {0.0: -INF, 0.999: 3.0},
    {0.5: -0.5, 0.9: -0.5},
    {None: -INF},
    {None: -INF, 0.4: NAN},
    {None: NAN},
    {None: INF},
]
WARPS = 2


class Model(_cross_entropy_forward.CrossEntropyForward):
    """What a thread finds in its part of a row that lies in a list."""

    sum_held = plain(_cross_entropy_forward.CrossEntropyForward.sum_held)
    absorb = plain(_cross_entropy_forward.CrossEntropyForward.absorb)


def argmax(monkeypatch, x, phase, scale, softcap):
    """As the kernel has it: each thread's, each warp's, and of these the row's."""
    threads = 32 * WARPS
    schedule = _schedule.Schedule(threads, threads, 1, 1, 2, 1)
    chunks = schedule.chunks(_schedule.most_vectors(len(x), 4, True))
    slots = np.full(chunks * 2 * threads * 4, -np.inf, np.float32)
    slots[phase : phase + len(x)] = x
    in_python = {
        **IN_PYTHON,
        "ptx": ptx,
        "load_shared": lambda s_address: s_address // _schedule.VECTOR_BYTES,
        "unpack": lambda dtype, vector: list(slots[4 * vector : 4 * vector + 4]),
        "maximum_or_nan": _device.maximum_or_nan,
    }
    for module in (_device, _cross_entropy_rows, _cross_entropy_forward):
        for name, value in in_python.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    model = Model(
        cutlass.Float32, schedule, True, target_bits=64, gradient=True, scalar=True, weighted=False, smoothing=False,
        logits="softcap" if softcap else "linear" if scale > 0 else "scaled", stats=True, shard=False,
    )  # fmt: skip
    found = []
    for thread in range(threads):
        facts = model.row_facts(
            len(x), chunks, thread, thread, 0, 0, 0, 0, len(x), *map(np.float32, (0.0, 0.0, scale, softcap or 1.0))
        )
        *_, key, index = model.sum_held(facts, thread * _schedule.VECTOR_BYTES, phase, np.float32(0.0))
        found.append((np.float32(key), np.int32(index)))
    for _ in range(2):
        entries = found + [(np.float32(-np.inf), np.int32(2**31 - 1))] * (-len(found) % 32)
        warps = [entries[start : start + 32] for start in range(0, len(entries), 32)]
        found = []
        for warp in warps:
            keys, indices = _device.warp_argmax(*map(np.array, zip(*warp, strict=True)))
            # All lanes have the same.
            assert len(set(indices.tolist())) == 1
            found.append((keys[0], indices[0]))
    monkeypatch.undo()
    ((_, index),) = found
    return int(index)


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize(("classes", "phase"), [(1, 0), (12, 0), (12, 3), (1003, 1), (1024, 0)])
def test_prediction(monkeypatch, classes, phase, scale, softcap, row):
    x = torch.full((classes,), -1.0)
    for share, value in row.items():
        x[slice(None) if share is None else int(share * classes)] = value
    x = scale * x
    with np.errstate(all="ignore"):
        got = argmax(monkeypatch, x.numpy(), phase, scale, softcap)
    assert got == (scale * x.double()).argmax(-1).item()


def test_the_order_of_two():
    keys = [np.float32(key) for key in (-INF, -1.0, -0.0, 0.0, 1.0, INF, NAN)]
    for a in keys:
        for b in keys:
            later = torch.tensor([a, b]).argmax().item()
            assert later == _with_ptx(_device.above, b, a), (a, b)
            for index, other in ((3, 5), (5, 3)):
                pair = torch.tensor([a, b] if index < other else [b, a])
                _, got = _with_ptx(_device.better, a, np.int32(index), b, np.int32(other))
                assert got == (min, max)[pair.argmax().item()](index, other), (a, b)


def _with_ptx(function, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_device, "ptx", ptx)
        return function(*arguments)
