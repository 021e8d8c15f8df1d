"""The order is pinned, and looks like chance."""

from __future__ import annotations

import math
import pickle
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from unisono.data.order import permutation
from unisono.errors import InputError


def _order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return permutation(seed, epoch, num_samples)(np.arange(num_samples))


def _excess(counts: np.ndarray, freedom: int) -> float:
    """Return how many standard deviations the chi-square statistic of equally likely counts exceeds its mean by."""
    expected = counts.mean()
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize(
    ("seed", "epoch", "num_samples", "positions", "indices"),
    [
        (0, 0, 10, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 2, 7, 4, 3, 1, 8, 0, 6, 5]),
        (0, 1, 10, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 4, 3, 5, 0, 7, 6, 2, 1]),
        (1, 0, 10, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 9, 3, 7, 6, 0, 1, 8, 5, 2]),
        (0, 0, 1024, [0, 1, 64, 1023], [789, 664, 638, 226]),
        (0, 0, 1025, [0, 1, 64, 1024], [327, 220, 678, 438]),
        (0, 0, 1_281_167, [0, 1, 64, 1281166], [1050415, 291714, 749107, 540227]),
        (2**70, 3, 10**9, [0, 1, 64, 999999999], [836446807, 842270934, 257684574, 878842418]),
        (
            -1,
            7,
            2**62,
            [0, 1, 64, 4611686018427387903],
            [2476918190027566075, 1222320157620082989, 249968927437614074, 2505339878023851890],
        ),
    ],
)
def test_the_order_has_not_changed(
    seed: int, epoch: int, num_samples: int, positions: list[int], indices: list[int]
) -> None:
    # A failure here means that every run ever recorded would see other data. Bump a version rather than the values.
    assert permutation(seed, epoch, num_samples)(positions).tolist() == indices


def test_tiny_epochs() -> None:
    assert _order(0, 0, 0).tolist() == []
    assert _order(0, 0, 1).tolist() == [0]
    assert {tuple(_order(0, epoch, 2).tolist()) for epoch in range(20)} == {(0, 1), (1, 0)}


def test_results_are_int64_in_the_shape_of_the_positions() -> None:
    perm = permutation(0, 0, 5000)
    expected = perm([6, 7, 8, 9]).tolist()
    for dtype in (np.uint8, np.int32, np.uint64):
        indices = perm(np.array([[6, 7], [8, 9]], dtype))
        assert indices.dtype == np.int64
        assert indices.shape == (2, 2)
        assert indices.ravel().tolist() == expected
    assert perm(6).shape == ()
    assert int(perm(6)) == expected[0]
    assert perm([]).dtype == np.int64


def test_the_positions_are_not_written_to() -> None:
    positions = np.arange(2000, dtype=np.uint64)
    permutation(0, 0, 2000)(positions)
    assert positions.tolist() == list(range(2000))


@pytest.mark.parametrize("num_samples", [1, 10, 5000])
@pytest.mark.parametrize("beyond", [-1, 0, 2**62, -(2**63)])
def test_a_position_outside_is_refused(num_samples: int, beyond: int) -> None:
    wrong = num_samples if beyond == 0 else beyond
    with pytest.raises(IndexError, match=f"position {wrong} is outside an epoch of {num_samples} samples"):
        permutation(0, 0, num_samples)([0, wrong])


def test_an_empty_epoch_has_no_positions() -> None:
    with pytest.raises(IndexError, match="position 0 is outside an epoch of 0 samples"):
        permutation(0, 0, 0)([0])


@pytest.mark.parametrize("positions", [[0.0], [True], ["0"]])
def test_positions_must_be_integers(positions: list[object]) -> None:
    with pytest.raises(TypeError, match="positions must be integers"):
        permutation(0, 0, 10)(positions)


@pytest.mark.parametrize("num_samples", [-1, 2**62 + 1])
def test_a_number_of_samples_without_an_order_is_refused(num_samples: int) -> None:
    with pytest.raises(InputError, match="num_samples must be from 0 to"):
        permutation(0, 0, num_samples)


def test_a_permutation_travels_to_a_worker() -> None:
    perm = permutation(3, 4, 5000)
    assert pickle.loads(pickle.dumps(perm)) == perm


def test_the_largest_epoch_needs_no_memory() -> None:
    tracemalloc.start()
    try:
        permutation(0, 0, 2**62 - 1)(np.arange(64))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


# The statistics below have fixed seeds, so they cannot flicker. Chance alone passes 6 standard deviations about
# once in 10**6 (the chi-square tail is fatter than the normal one); four rounds instead of eight give over 100.


@pytest.mark.parametrize("num_samples", [4, 5])
def test_all_orders_of_a_few_appear_equally_often(num_samples: int) -> None:
    num_orders = math.factorial(num_samples)
    counts = Counter(tuple(_order(seed, 0, num_samples).tolist()) for seed in range(100 * num_orders))
    assert len(counts) == num_orders
    assert abs(_excess(np.array(list(counts.values())), num_orders - 1)) < 6


@pytest.mark.parametrize("num_samples", [5, 10, 100])
def test_every_index_is_equally_likely_at_every_position(num_samples: int) -> None:
    orders = np.array([_order(0, epoch, num_samples) for epoch in range(3000)])
    counts = np.array([np.bincount(column, minlength=num_samples) for column in orders.T])
    assert abs(_excess(counts, (num_samples - 1) ** 2)) < 6


@pytest.mark.parametrize("num_samples", [100, 1037, 2000, 10_007])
def test_positions_at_any_distance_are_unrelated(num_samples: int) -> None:
    orders = np.array([_order(0, epoch, num_samples) for epoch in range(200)])
    worst = 0.0
    # Whatever grid the network works on, its columns are among these distances.
    for distance in range(1, min(num_samples, 130)):
        steps = (orders[:, distance:] - orders[:, :-distance]) % num_samples
        counts = np.bincount(steps.ravel(), minlength=num_samples)
        assert counts[0] == 0
        worst = max(worst, abs(_excess(counts[1:], num_samples - 2)))
    assert worst < 6


@pytest.mark.parametrize("num_samples", [10, 2000, 10_007])
def test_fixed_points_are_as_rare_as_chance_has_them(num_samples: int) -> None:
    fixed = [int((_order(0, epoch, num_samples) == np.arange(num_samples)).sum()) for epoch in range(1500)]
    assert np.mean(fixed) == pytest.approx(1, abs=0.15)
    assert np.var(fixed) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("num_samples", [100, 2000, 100_003])
def test_epochs_are_unrelated(num_samples: int) -> None:
    orders = [_order(0, epoch, num_samples) for epoch in range(10)]
    for before, after in pairwise(orders):
        assert abs(np.corrcoef(before, after)[0, 1]) < 5 / math.sqrt(num_samples)
