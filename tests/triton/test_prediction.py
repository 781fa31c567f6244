"""The prediction is torch's argmax whatever the row holds: NaN before inf, the first of equals, 0.0 equal to -0.0."""

import loss_core
import pytest
import torch
from support import devices

REASON = devices.unavailable_reason("triton")
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"triton: {REASON}")

INF, NAN = float("inf"), float("nan")
# Of a row of -1: what lies where, as a share of the row. The last two are all of it.
ROWS = [
    {0.2: INF, 0.8: NAN},
    {0.2: NAN, 0.8: INF},
    {0.3: NAN, 0.9: NAN},
    {0.1: INF, 0.6: INF},
    {0.2: -0.0, 0.7: 0.0},
    {0.2: 0.0, 0.7: -0.0},
    {0.0: -INF, 0.999: 3.0},
    {0.5: -0.5, 0.9: -0.5},
    {None: -INF},
    {None: NAN},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize("classes", [12, 1003, 20001])
def test_prediction(classes, scale, dtype, device):
    logits = torch.full((len(ROWS), classes), -1.0)
    for row, places in zip(logits, ROWS, strict=True):
        for share, value in places.items():
            row[slice(None) if share is None else int(share * classes)] = value
    logits = (scale * logits).to(dtype)
    wanted = (scale * logits.double()).argmax(-1)
    target = wanted.clone()
    target[::2] = -100
    result = loss_core.cross_entropy_with_stats(
        logits.to(device), target.to(device), logit_scale=scale, reduction="none", backend="triton"
    )
    assert result.prediction.tolist() == wanted.tolist()
    assert result.correct.tolist() == (target != -100).tolist()
