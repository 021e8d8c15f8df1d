"""Who keeps the others waiting, and why."""

from __future__ import annotations

import pytest

from unisono.observe.stragglers import WINDOW, Stragglers, uneven

EVEN = [(0.001, 0.010), (0.001, 0.010), (0.001, 0.011)]


def said(watch: Stragglers, *steps: list[tuple[float, float]]) -> list[str]:
    return [sentence for loads in steps if (sentence := watch.step(loads)) is not None]


def test_the_slowest_and_by_how_much() -> None:
    assert uneven([(0.0, 1.0), (1.0, 2.0), (0.0, 2.0)]) == (1, pytest.approx(1.5))
    assert uneven([(0.0, 0.0), (0.0, 0.0)]) == (0, 1.0)
    assert uneven([]) == (0, 1.0)


@pytest.mark.parametrize(
    ("slow", "words"), [((0.021, 0.010), "20 ms of it wait for data"), ((0.001, 0.030), "20 ms of it compute")]
)
def test_it_is_named_once_with_where_its_time_goes(slow: tuple[float, float], words: str) -> None:
    watch = Stragglers(["a", "b", "c"])
    loads = [EVEN[0], slow, EVEN[0]]
    assert said(watch, *[loads] * (WINDOW - 1)) == []
    (sentence,) = said(watch, *[loads] * (3 * WINDOW))
    assert "rank 1 (b) needs 2.8 times the others' time" in sentence
    assert words in sentence


def test_a_second_one_is_named_too() -> None:
    watch = Stragglers(["a", "b", "c"])
    assert len(said(watch, *[[EVEN[0], (0.0, 0.1), EVEN[0]]] * WINDOW)) == 1
    (sentence,) = said(watch, *[[(0.0, 0.1), EVEN[0], EVEN[0]]] * WINDOW)
    assert "rank 0 (a)" in sentence


def test_nobody_is_named_for_a_little_or_for_now_and_then() -> None:
    watch = Stragglers(["a", "b", "c"])
    assert said(watch, *[EVEN] * (2 * WINDOW)) == []
    hiccup = [EVEN[0], (0.5, 0.5), EVEN[0]]
    assert said(watch, *[hiccup, EVEN, EVEN] * WINDOW) == []
    assert said(Stragglers(["a", "b"]), *[[(0.0, 1e-4), (0.0, 3e-4)]] * (2 * WINDOW)) == []
    assert said(Stragglers([]), *[[(1.0, 1.0)]] * (2 * WINDOW)) == []
