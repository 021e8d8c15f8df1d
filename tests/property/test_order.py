"""What holds for the order of every epoch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.order import permutation

# Both sides of the place where the sort gives way to the network, and far beyond it.
sizes = st.integers(0, 4000) | st.integers(1000, 1100)
large_sizes = st.integers(2000, 2**62)
integers = st.integers(-(2**80), 2**80)


@settings(deadline=None)
@given(integers, integers, sizes)
def test_every_sample_comes_exactly_once(seed: int, epoch: int, num_samples: int) -> None:
    indices = permutation(seed, epoch, num_samples)(np.arange(num_samples))
    assert sorted(indices.tolist()) == list(range(num_samples))


@settings(deadline=None)
@given(st.integers(1025, 4000), st.integers(64, 100), st.integers(63, 100))
def test_a_loose_grid_only_costs_longer_walks(num_samples: int, rows: int, columns: int) -> None:
    # The grids that `permutation` picks are so tight that a walk of three steps is hardly ever seen.
    tight = permutation(0, 0, num_samples)
    loose = dataclasses.replace(tight, rows=rows, columns=columns)
    assert sorted(loose(np.arange(num_samples)).tolist()) == list(range(num_samples))


@settings(deadline=None)
@given(st.integers(1, 2**62))
def test_walks_are_rare(num_samples: int) -> None:
    perm = permutation(0, 0, num_samples)
    assert 0 <= perm.rows * perm.columns - num_samples <= math.isqrt(num_samples)


@settings(deadline=None)
@given(integers, integers, large_sizes, st.data())
def test_different_positions_give_different_samples(
    seed: int, epoch: int, num_samples: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, num_samples - 2000))
    spread = data.draw(st.integers(1, (num_samples - start - 1) // 1999))
    indices = permutation(seed, epoch, num_samples)(start + spread * np.arange(2000)).tolist()
    assert len(set(indices)) == 2000
    assert all(0 <= index < num_samples for index in indices)


@settings(deadline=None)
@given(integers, integers, st.integers(1, 4000), st.data())
def test_grouping_does_not_show(seed: int, epoch: int, num_samples: int, data: st.DataObject) -> None:
    whole = permutation(seed, epoch, num_samples)(np.arange(num_samples)).tolist()
    perm = permutation(seed, epoch, num_samples)
    positions = data.draw(st.lists(st.integers(0, num_samples - 1), max_size=50))
    assert perm(positions).tolist() == [whole[position] for position in positions]
    assert [int(perm(position)) for position in positions] == [whole[position] for position in positions]


@settings(deadline=None)
@given(st.sampled_from(["seed", "epoch", "num_samples"]), integers, integers, large_sizes)
def test_each_argument_changes_the_order(changed: str, seed: int, epoch: int, num_samples: int) -> None:
    arguments = {"seed": seed, "epoch": epoch, "num_samples": num_samples}
    other = arguments | {changed: arguments[changed] - 1}
    positions = np.arange(1000)
    same = permutation(**arguments)(positions) == permutation(**other)(positions)
    # One of the 1000 is expected to agree by chance where n is at its smallest; 20 would happen once in 10**20.
    assert same.sum() < 20
