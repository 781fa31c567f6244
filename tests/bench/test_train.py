"""Whose curve the others are held to, and training that is taken up again."""

from __future__ import annotations

import math

import pytest
from loss_bench.train import SIZES, Curve, compare_curves

SMALL = SIZES["small"]


def curve(backend, *losses):
    return Curve(backend, "fake", "a model", losses=list(losses))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_curve_that_is_not_finite_makes_no_other_one_wrong(bad, place):
    curves = [curve("a", 3.0, 2.0), curve("b", 3.0, 2.0005)]
    curves.insert(place, curve("broken", 3.0, bad))
    compare_curves(curves, SMALL)
    found = {each.backend: (each.status, each.reason) for each in curves}
    assert found == {"a": ("ok", ""), "b": ("ok", ""), "broken": ("wrong", "a loss is NaN or infinite")}
    assert [each.difference for each in curves if each.backend != "broken"] == [0, pytest.approx(5e-4, rel=1e-3)]


def test_all_are_wrong_if_none_is_finite():
    curves = [curve("a", math.nan), curve("b", math.inf)]
    compare_curves(curves, SMALL)
    assert [each.status for each in curves] == ["wrong", "wrong"]


def test_curves_are_held_to_that_of_plain_torch_wherever_it_stands():
    """Each new curve brings a new verdict on all."""
    curves = [curve("astray", 3.0, 2.5)]
    for backend in ("right", "torch-nn"):
        compare_curves(curves, SMALL)
        curves.append(curve(backend, 3.0, 2.0))
    compare_curves(curves, SMALL)
    assert [(each.backend, each.status) for each in curves] == [
        ("astray", "wrong"),
        ("right", "ok"),
        ("torch-nn", "ok"),
    ]
    assert curves[0].reason == "the curve is 0.5 away from torch-nn's"


def test_one_that_did_not_train_is_left_as_it_is():
    curves = [Curve("gone", "fake", "a model", "crashed", "boom"), curve("a", 3.0)]
    compare_curves(curves, SMALL)
    assert (curves[0].status, curves[0].reason, curves[0].difference) == ("crashed", "boom", None)
    assert curves[1].difference == 0
