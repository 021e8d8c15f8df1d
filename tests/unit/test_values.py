"""Logged values and their means over a step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from unisono.errors import InputError
from unisono.strategy.extras import RankStep
from unisono.strategy.values import StepValues, average

CPU = torch.device("cpu")
NAN = math.nan


def collected(*micros: dict[str, Any]) -> StepValues:
    values = StepValues(CPU)
    for micro in micros:
        values.begin_micro_batch()
        values.log(micro)
    return values


def test_rows_are_micro_batches_and_columns_names_in_order() -> None:
    values = collected({"b": 2, "a": torch.tensor(1.5)}, {"a": torch.ones(1, 1), "b": np.float32(3)})
    assert values.names == ["a", "b"]
    values.start_copy()
    assert values.read() == [[1.5, 2.0], [1.0, 3.0]]


@pytest.mark.parametrize("micros", [({"a": 1, "b": 2}, {"a": 3}), ({"a": 3}, {"a": 1, "b": 2}), ({}, {"b": 2}, {})])
def test_names_that_only_some_micro_batches_logged_are_refused(micros: tuple[dict[str, Any], ...]) -> None:
    """Ranks with one micro-batch each would differ, which is refused: so it is on one rank with all of them."""
    values = collected(*micros)
    for look in (values.read, values.start_copy):
        with pytest.raises(InputError, match=r"the value b was logged in some micro-batches .* decide by run\.step"):
            look()


def test_a_step_in_which_nothing_is_logged() -> None:
    values = collected({}, {})
    values.start_copy()
    assert values.read() == [[], []]
    assert average([], [rank([1.0, 1.0], values.read())], [2]) == {}


def test_a_later_value_of_a_name_replaces_the_earlier() -> None:
    values = collected({"loss": 1.0})
    values.log({"loss": 2.0})
    assert values.read() == [[2.0]]


def test_what_is_logged_outside_of_a_micro_batch_is_nobodys() -> None:
    values = StepValues(CPU)
    values.log({"loss": 1.0})
    assert values.read() == []
    assert values.names == []


def test_the_hash_tells_names_apart() -> None:
    sets = [collected({}), collected({"a": 1}), collected({"b": 1}), collected({"a": 1, "b": 1}), collected({"ab": 1})]
    assert len({values.names_hash for values in sets}) == 5
    assert collected({"b": 1, "a": 2}).names_hash == collected({"a": 1, "b": 3}, {"a": 4, "b": 5}).names_hash


@pytest.mark.parametrize("value", ["high", [1, 2], torch.ones(2), None, {"a": 1}])
def test_a_value_that_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InputError, match="the logged value score is no single number"):
        collected({"score": value}).read()


def test_there_is_room_for_eight_values() -> None:
    assert len(collected({f"v{k}": k for k in range(8)}).read()[0]) == 8
    with pytest.raises(InputError, match="more than 8 values"):
        collected({f"v{k}": k for k in range(9)})


def test_eight_values_a_step_not_a_micro_batch() -> None:
    values = collected({f"a{k}": k for k in range(5)})
    values.begin_micro_batch()
    with pytest.raises(InputError, match="more than 8 values"):
        values.log({f"b{k}": k for k in range(5)})


def rank(scales: list[float], values: list[list[float]]) -> RankStep:
    return RankStep(step=0, scales=[scales], values=values)


def test_the_mean_is_weighted() -> None:
    ranks = [rank([1.0, 0.5], [[10.0, NAN], [20.0, 4.0]]), rank([0.25], [[40.0, 8.0]])]
    found = average(["loss", "some"], ranks, [2, 1])
    assert found["loss"] == pytest.approx((10 * 4 + 20 * 2 + 40) / 7)
    assert found["some"] == pytest.approx((4 * 2 + 8) / 3)  # over those that said something


def test_the_split_over_ranks_cannot_show() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = (
        torch.randn(12, generator=generator).double() * 10.0 ** torch.randint(-9, 9, (12,), generator=generator)
    ).tolist()
    scales = (torch.rand(12, generator=generator) + 0.1).tolist()
    found = set()
    for cuts in ([12], [1, 11], [4, 4, 4], [6, 0, 5, 1], [1] * 12):
        ranks, at = [], 0
        for count in cuts:
            ranks.append(rank(scales[at : at + count], [[value] for value in numbers[at : at + count]]))
            at += count
        found.add(average(["loss"], ranks, cuts)["loss"].hex())
    assert len(found) == 1


def test_totals_are_added_exactly() -> None:
    values = [1e16, 1.0, -1e16, 1.0]
    assert average(["x"], [rank([1.0] * 4, [[value] for value in values])], [4]) == {"x": 0.5}


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([math.inf, 1.0], math.inf),
        ([-math.inf, 1.0], -math.inf),
        ([math.inf, -math.inf, 1.0], NAN),
        ([1e308, 1e308], NAN),  # the sum is too large for a float
    ],
)
def test_infinities_that_cancel_are_no_error(values: list[float], mean: float) -> None:
    found = average(["x", "y"], [rank([1.0] * len(values), [[value, 1.0] for value in values])], [len(values)])
    assert repr(found["x"]) == repr(mean)
    assert found["y"] == 1.0


def test_shadows_and_weightless_micro_batches_do_not_count() -> None:
    ranks = [rank([1.0, 0.0], [[3.0], [999.0]]), rank([], [[777.0]])]
    assert average(["loss"], ranks, [2, 0]) == {"loss": 3.0}
    # Where no micro-batch has a weight, they have the same.
    assert average(["loss"], [rank([0.0, 0.0], [[5.0], [6.0]]), rank([0.0], [[10.0]])], [2, 1]) == {"loss": 7.0}


def test_the_weights_are_those_of_the_first_optimizer_that_was_stepped() -> None:
    ranks = [RankStep(step=0, scales=[[], [1.0, 3.0]], values=[[5.0], [9.0]])]
    assert average(["loss"], ranks, [2]) == {"loss": 8.0}
