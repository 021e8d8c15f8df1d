"""The one order of additions.

The sum of a step is one binary tree over its micro-batches, the same for every world size. The node at
level k, index i covers the leaves [i * 2**k, min((i + 1) * 2**k, num_leaves)); a node without a right
child *is* its left child. Floating-point addition is not associative, so this shape is part of a run's
definition: whoever computes a node, in whatever order the parts arrive, gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A place in the tree: `level` 0 are the leaves."""

    level: int
    number: int


def _promote(node: Node, num_leaves: int) -> Node:
    """Climbs while `node` has no right sibling, where it equals its parent."""
    level, index = node
    while index and index % 2 == 0 and (index + 1) << level >= num_leaves:
        level, index = level + 1, index // 2
    return Node(level, index)


def _root(num_leaves: int) -> Node:
    return Node((num_leaves - 1).bit_length(), 0)


@lru_cache(maxsize=4096)
def roots(block: range, num_leaves: int) -> tuple[Node, ...]:
    """Returns the fewest nodes that together cover `block`, in leaf order.

    It is what a rank holds after it has added all of its own leaves, known to everyone without asking.

    Args:
        block: Consecutive leaves.
        num_leaves: Leaves of the whole tree.
    """
    tree: TreeAccumulator[None] = TreeAccumulator(num_leaves, lambda left, right: None)
    for leaf in block:
        tree.add(leaf, None)
    return tuple(node for node, _ in tree.items())


class TreeAccumulator(Generic[T]):
    """Adds leaves, or nodes that others have added up, in the tree's order.

    Siblings merge as soon as both are there, so the order of arrival does not matter and at most
    about log2(num_leaves) + 1 values are alive when leaves arrive in order.

    Args:
        num_leaves: Leaves of the whole tree, at least 1.
        merge: `merge(left, right)` returns the sum; it may work in place in `left`.

    Determinism: the result depends on the leaves' values alone.
    """

    def __init__(self, num_leaves: int, merge: Callable[[T, T], T]) -> None:
        self.num_leaves = num_leaves
        self._merge = merge
        self._nodes: dict[Node, T] = {}

    def add(self, leaf: int, value: T) -> None:
        """Adds the value of one leaf."""
        self.add_node(Node(0, leaf), value)

    def add_node(self, node: Node, value: T) -> None:
        """Adds the value of a node whose leaves were summed elsewhere.

        Raises:
            ValueError: the node lies outside of the tree, or was added before.
        """
        if node.number < 0 or node.number << node.level >= self.num_leaves:
            raise ValueError(f"{node} lies outside of a tree of {self.num_leaves} leaves")
        while True:
            node = _promote(node, self.num_leaves)
            if node in self._nodes:
                raise ValueError(f"{node} was added twice")
            sibling = Node(node.level, node.number ^ 1)
            if node == _root(self.num_leaves) or sibling not in self._nodes:
                self._nodes[node] = value
                return
            other = self._nodes.pop(sibling)
            value = self._merge(other, value) if node.number % 2 else self._merge(value, other)
            node = Node(node.level + 1, node.number // 2)

    def sibling_of(self, leaf: int) -> T | None:
        """Returns the pending left neighbour that `leaf` would be added to at once, if there is one."""
        return self._nodes.get(Node(0, leaf - 1)) if leaf % 2 else None

    def items(self) -> Iterator[tuple[Node, T]]:
        """Yields the nodes that have not merged yet, in leaf order."""
        yield from sorted(self._nodes.items(), key=lambda item: item[0].number << item[0].level)

    def result(self) -> T:
        """Returns the sum of all leaves.

        Raises:
            ValueError: leaves are missing.
        """
        if list(self._nodes) != [_root(self.num_leaves)]:
            raise ValueError(f"the tree of {self.num_leaves} leaves is not complete: it holds {sorted(self._nodes)}")
        return self._nodes[_root(self.num_leaves)]
