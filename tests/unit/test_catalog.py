"""Strategies by name."""

from __future__ import annotations

import pytest

from unisono.errors import InputError
from unisono.strategy.catalog import STRATEGIES, strategy_name


def test_every_strategy_has_a_name_and_fsdp_is_another_of_zero3() -> None:
    assert list(STRATEGIES) == ["ddp", "zero1", "zero2", "zero3"]
    assert [strategy_name(name) for name in STRATEGIES] == list(STRATEGIES)
    assert strategy_name("fsdp") == "zero3"


@pytest.mark.parametrize(("name", "hint"), [("zero4", "zero3"), ("fdsp", "fsdp"), ("none", "there is ddp, zero1")])
def test_a_name_that_is_none_is_refused_with_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        strategy_name(name)
