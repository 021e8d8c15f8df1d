"""LossScale."""

from __future__ import annotations

import pytest

from unisono.errors import InputError
from unisono.strategy.loss_scale import LossScale


def test_it_halves_after_an_overflow_and_doubles_after_a_long_time_without() -> None:
    scale = LossScale()
    scale.end_step(finite=False)
    assert scale.value == 2.0**15
    for _ in range(1_999):
        scale.end_step(finite=True)
    assert scale.value == 2.0**15
    scale.end_step(finite=True)
    assert scale.value == 2.0**16
    scale.end_step(finite=True)
    assert scale.value == 2.0**16, "the count begins anew"


def test_a_gradient_that_no_scale_makes_finite_ends_the_run() -> None:
    scale = LossScale()
    for _ in range(16):
        scale.end_step(finite=False)
    assert scale.value == 1.0
    with pytest.raises(InputError, match="not finite at any loss scale"):
        scale.end_step(finite=False)
