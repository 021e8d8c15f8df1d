"""What holds for the one order of additions."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.numerics.tree import Node, TreeAccumulator, roots

# Of wildly different magnitude, so that almost every other order of additions gives another sum.
numbers = st.builds(lambda mantissa, exponent: mantissa * 10.0**exponent, st.floats(-10, 10), st.integers(-25, 25))
leaves = st.lists(numbers, min_size=1, max_size=70)


def pairwise_fold(values: list[Any]) -> Any:
    """The tree, said in another way: neighbours are added level by level, and an odd one moves up."""
    while len(values) > 1:
        odd = values[len(values) & ~1 :]
        values = [left + right for left, right in zip(values[::2], values[1::2], strict=False)] + odd
    return values[0]


def accumulator(num_leaves: int) -> TreeAccumulator[float]:
    return TreeAccumulator(num_leaves, lambda left, right: left + right)


def split(draw: st.DrawFn, num_leaves: int) -> list[range]:
    """Contiguous blocks, one a rank, some perhaps empty."""
    cuts = sorted(draw(st.lists(st.integers(0, num_leaves), max_size=6)))
    return [range(start, stop) for start, stop in zip([0, *cuts], [*cuts, num_leaves], strict=True)]


def test_these_numbers_tell_orders_apart() -> None:
    values = [1e16, 1.0, 1.0, 1.0, 1.0]
    assert sum(values) != pairwise_fold(values)
    assert pairwise_fold([0.1, 0.2, 0.3]) == (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3)


@settings(deadline=None)
@given(leaves, st.randoms(use_true_random=False))
def test_the_order_of_arrival_cannot_show(values: list[float], rng: random.Random) -> None:
    tree = accumulator(len(values))
    order = list(range(len(values)))
    rng.shuffle(order)
    for leaf in order:
        tree.add(leaf, values[leaf])
    assert tree.result().hex() == pairwise_fold(values).hex()


@settings(deadline=None)
@given(leaves, st.randoms(use_true_random=False), st.data())
def test_the_split_over_ranks_cannot_show(values: list[float], rng: random.Random, data: st.DataObject) -> None:
    num_leaves = len(values)
    parts = []
    for block in split(data.draw, num_leaves):
        tree = accumulator(num_leaves)
        for leaf in rng.sample(block, len(block)):
            tree.add(leaf, values[leaf])
        held = list(tree.items())
        assert tuple(node for node, _ in held) == roots(block, num_leaves)  # what the other ranks expect of this one
        parts += held
    total = accumulator(num_leaves)
    rng.shuffle(parts)
    for node, value in parts:
        total.add_node(node, value)
    assert total.result().hex() == pairwise_fold(values).hex()


@settings(deadline=None)
@given(st.integers(1, 40), st.randoms(use_true_random=False), st.integers(0, 2**32))
def test_tensors_may_be_added_in_place(num_leaves: int, rng: random.Random, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(5, generator=generator) * 10.0 ** rng.randint(-8, 8) for _ in range(num_leaves)]
    expected = pairwise_fold(values)
    tree: TreeAccumulator[torch.Tensor] = TreeAccumulator(num_leaves, torch.Tensor.add_)
    for leaf in rng.sample(range(num_leaves), num_leaves):
        tree.add(leaf, values[leaf].clone())
    assert torch.equal(tree.result(), expected)


def test_left_is_left() -> None:
    for arrival in ([0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [3, 6, 0, 5, 2, 4, 1]):
        tree: TreeAccumulator[str] = TreeAccumulator(7, lambda left, right: f"({left}{right})")
        for leaf in arrival:
            tree.add(leaf, "abcdefg"[leaf])
        assert tree.result() == "(((ab)(cd))((ef)g))"


def all_nodes(num_leaves: int) -> set[frozenset[int]]:
    """The leaves beneath each node of the tree, from folding sets of leaves."""
    level = [frozenset([leaf]) for leaf in range(num_leaves)]
    found = set(level)
    while len(level) > 1:
        level = [frozenset().union(*level[start : start + 2]) for start in range(0, len(level), 2)]
        found |= set(level)
    return found


@settings(deadline=None)
@given(st.integers(1, 60), st.data())
def test_roots_are_the_fewest_nodes_that_cover_a_block(num_leaves: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, num_leaves))
    block = range(start, data.draw(st.integers(start, num_leaves)))
    inside = [node for node in all_nodes(num_leaves) if node <= set(block)]
    largest = {node for node in inside if not any(node < other for other in inside)}
    found = roots(block, num_leaves)
    covered = [frozenset(leaf for leaf in range(num_leaves) if leaf >> level == number) for level, number in found]
    assert set(covered) == largest
    assert len(covered) == len(largest)
    assert [leaf for node in covered for leaf in sorted(node)] == list(block)


@settings(deadline=None)
@given(st.integers(1, 3000), st.data())
def test_memory_is_logarithmic(num_leaves: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, num_leaves - 1))
    block = range(start, data.draw(st.integers(start + 1, num_leaves)))
    alive = most = 0

    def merge(left: None, right: None) -> None:
        nonlocal alive
        alive -= 1

    tree: TreeAccumulator[None] = TreeAccumulator(num_leaves, merge)
    for leaf in block:
        tree.add(leaf, None)
        alive += 1
        most = max(most, alive)
        assert len(list(tree.items())) == alive
    # 3000 leaves have 12 levels. A block that starts in the middle goes up on its left side and down on its right.
    assert most <= (12 if start == 0 else 24)
    assert most <= 1 + len(block).bit_length() * (1 if start == 0 else 2)


@settings(deadline=None)
@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_leaf_that_comes_twice_raises(num_leaves: int, rng: random.Random) -> None:
    arrivals = rng.sample(range(num_leaves), num_leaves)
    arrivals.insert(rng.randrange(num_leaves + 1), rng.randrange(num_leaves))

    def add_all() -> None:
        tree = accumulator(num_leaves)
        for leaf in arrivals:
            tree.add(leaf, 1.0)
        tree.result()

    with pytest.raises(ValueError, match=r"twice|not complete"):
        add_all()


@settings(deadline=None)
@given(st.integers(1, 40), st.data())
def test_a_leaf_that_is_missing_raises(num_leaves: int, data: st.DataObject) -> None:
    missing = data.draw(st.integers(0, num_leaves - 1))
    tree = accumulator(num_leaves)
    for leaf in range(num_leaves):
        if leaf != missing:
            tree.add(leaf, 1.0)
    with pytest.raises(ValueError, match=f"{num_leaves} leaves is not complete"):
        tree.result()
    tree.add(missing, 1.0)
    assert tree.result() == num_leaves


@pytest.mark.parametrize("node", [Node(0, 5), Node(0, -1), Node(1, 3), Node(3, 1)])
def test_a_node_outside_of_the_tree_raises(node: Node) -> None:
    with pytest.raises(ValueError, match="outside of a tree of 5 leaves"):
        accumulator(5).add_node(node, 1.0)


@pytest.mark.parametrize("num_leaves", [2, 3, 8])
def test_the_neighbour_that_a_leaf_would_be_added_to(num_leaves: int) -> None:
    tree = accumulator(num_leaves)
    assert tree.sibling_of(1) is None
    tree.add(0, 7.0)
    assert tree.sibling_of(1) == 7.0
    assert tree.sibling_of(0) is None
    tree.add(1, 1.0)
    assert tree.sibling_of(1) is None
