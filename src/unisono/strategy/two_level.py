"""Reduction on several hosts: added up inside of each host first, so that a sum crosses the network, not its parts.

Each host's ranks share the work: the shard of an owner on another host is added up by one of them, the collector, which
sends what the tree has merged so far. The order of additions is the tree's, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from unisono.comm.api import Collectives, Pending
from unisono.comm.both import TwoLevelCollectives
from unisono.numerics.tree import Node, TreeAccumulator
from unisono.strategy.base import StepPlan
from unisono.strategy.flat import FlatGroup
from unisono.strategy.reduction import GRADIENTS, Addends, Nodes, Partition, Reduction


def make_reduction(comm: Collectives, group: FlatGroup, plan: StepPlan, partition: Partition, own: Nodes) -> Reduction:
    """Makes what suits the way that ranks reach each other."""
    if isinstance(comm, TwoLevelCollectives) and not partition.one_shot:
        return TwoLevelReduction(comm, group, plan, partition, own)
    return Reduction(comm, group, plan, partition, own)


class TwoLevelReduction(Reduction):
    """See the module's docstring; arguments as for `Reduction`."""

    def __init__(
        self, comm: TwoLevelCollectives, group: FlatGroup, plan: StepPlan, partition: Partition, own: Nodes
    ) -> None:
        super().__init__(comm, group, plan, partition, own)
        self._levels = comm
        self._host = next(host for host in comm.hosts if comm.rank in host)
        self._mine = [owner for owner in range(comm.world_size) if self._collector(owner, self._host) == comm.rank]
        # What is left of each host's nodes once it has merged them, known to everyone without asking.
        self._merged = [self._merge([self.nodes[rank] for rank in host]) for host in comm.hosts]
        self._far: list[Pending] = []
        self._trees: list[TreeAccumulator[torch.Tensor] | None] = []
        self._came: list[Addends] = []

    def _collector(self, owner: int, host: Sequence[int]) -> int:
        """Who of a host adds up the shard of `owner`: itself, if it is one of them."""
        if owner in host:
            return owner
        theirs = next(other for other in self._levels.hosts if owner in other)
        return host[theirs.index(owner) % len(host)]

    def _merge(self, nodes: Sequence[Sequence[Node]]) -> list[Node]:
        tree: TreeAccumulator[None] = TreeAccumulator(self.plan.num_micro, lambda left, right: None)
        for node in (node for some in nodes for node in some):
            tree.add_node(node, None)
        return [node for node, _ in tree.items()]

    def launch_next(self) -> None:
        slot = len(self.loans)
        shards, ranks = self.partition.shards[slot], range(self.comm.world_size)
        sends: list[list[torch.Tensor]] = [[] for _ in ranks]
        for owner in ranks:
            collector = self._collector(owner, self._host)
            sends[collector] += [buffer.flat[shards[owner].start : shards[owner].stop] for _, buffer in self.own]
        sizes: list[list[int]] = [[] for _ in ranks]
        for peer in self._host:
            if peer != self.comm.rank:
                sizes[peer] = [len(shards[owner]) for owner in self._mine for _ in self.nodes[peer]]
        sends[self.comm.rank] = []
        channel = GRADIENTS + self.group.number
        self.loans.append(self._levels.inner.lend_shards(sends, sizes, partial(self.group.inbox, slot), channel))

    def _begin_sums(self) -> None:
        for slot, loan in enumerate(self.loans):
            pieces = [iter(parts) for parts in loan.received()]
            shards, rank = self.partition.shards[slot], self.comm.rank
            sends: list[list[torch.Tensor]] = [[] for _ in shards]
            own_tree = None
            for owner in self._mine:
                shard = shards[owner]
                tree: TreeAccumulator[torch.Tensor] = TreeAccumulator(self.plan.num_micro, torch.Tensor.add_)
                for node, buffer in self.own:
                    tree.add_node(node, buffer.flat[shard.start : shard.stop])
                for peer in self._host:
                    for node in self.nodes[peer] if peer != rank else ():
                        tree.add_node(node, next(pieces[peer]))
                if owner == rank:
                    own_tree = tree
                else:
                    sends[owner] = [part for _, part in tree.items()]
            self._trees.append(own_tree)
            self._far.append(self._send_far(slot, sends, len(shards[rank])))

    def _send_far(self, slot: int, sends: list[list[torch.Tensor]], length: int) -> Pending:
        receives: list[list[torch.Tensor]] = [[] for _ in sends]
        hosts = [(n, host) for n, host in enumerate(self._levels.hosts) if self.comm.rank not in host]
        memory = self.group.inbox(slot, length * sum(len(self._merged[number]) for number, _ in hosts))
        came, parts = [], iter(torch.split(memory, length) if length else ())
        for number, host in hosts:
            collector = self._collector(self.comm.rank, host)
            for node in self._merged[number] if length else ():
                came.append((node, next(parts)))
                receives[collector].append(came[-1][1])
        self._came.append(came)
        return self._levels.outer.exchange_shards(sends, receives, GRADIENTS + self.group.number)

    def _addends(self, slot: int, shard: range) -> Addends:
        self._far[slot].wait()
        tree = self._trees[slot]
        assert tree is not None
        return [*tree.items(), *self._came[slot]]
