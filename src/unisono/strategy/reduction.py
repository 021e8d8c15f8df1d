"""Reduction: a reduce-scatter and an all-gather of one group's gradients, with the order of additions ours."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import torch

from unisono.comm.api import Collectives, CopiedLoan, Loan, Pending
from unisono.numerics.layout import BLOCK_ELEMENTS
from unisono.numerics.tree import Node, TreeAccumulator, roots
from unisono.strategy.base import StepPlan
from unisono.strategy.flat import FlatBuffer, FlatGroup
from unisono.strategy.team import Team

Nodes: TypeAlias = list[tuple[Node, FlatBuffer]]
Addends: TypeAlias = list[tuple[Node, torch.Tensor]]
# On a CPU a sum is made, divided and measured piece by piece, each while it is in the cache: see docs/design/0008.
CACHED_ELEMENTS = 64 * BLOCK_ELEMENTS
# Messages between two ranks match within a channel, so that one kind may overtake another. Each group has a
# channel of its own for its gradients: backward fills the buckets of two groups in turns, the ranks not alike.
EXTRAS, RESULTS, BUFFERS, GRADIENTS = 1, 2, 3, 4


class Partition:
    """Who owns what of a group, worked out once.

    Args:
        one_shot: Everybody adds up everything: one exchange instead of two, which sends more at W > 2.
        whole: A parameter has one owner.
        team: Whose peers own neighbouring runs; by default runs go by rank.

    Attributes:
        buckets: The units of exchange.
        shards: For each bucket, the range of each rank.
        norms: The same as indices of blocks.
    """

    def __init__(
        self,
        group: FlatGroup,
        comm: Collectives,
        *,
        one_shot: bool = False,
        whole: bool = False,
        team: Team | None = None,
    ) -> None:
        layout, self.one_shot = group.layout, one_shot
        self.buckets = group.buckets
        if one_shot:
            self.shards = [[bucket] * comm.world_size for bucket in self.buckets]
        elif whole:
            owned = layout.owned(comm.world_size)
            self.shards = [[_overlap(bucket, part) for part in owned] for bucket in self.buckets]
        else:
            self.shards = [layout.shards(bucket, comm.world_size) for bucket in self.buckets]
        if team is not None:
            self.shards = [[shards[team.run_of(rank)] for rank in range(comm.world_size)] for shards in self.shards]
        self.norms = [[layout.blocks_in(shard) for shard in shards] for shards in self.shards]

    def own(self, rank: int) -> list[range]:
        """Returns the shards of a rank, one a bucket."""
        return [shards[rank] for shards in self.shards]


def _overlap(one: range, other: range) -> range:
    start = min(max(one.start, other.start), one.stop)
    return range(start, max(start, min(one.stop, other.stop)))


class Norms:
    """The norms of a group's blocks, each measured by its owner."""

    def __init__(self, comm: Collectives, group: FlatGroup, partition: Partition) -> None:
        self.comm, self.partition = comm, partition
        # At least float32; a norm of float64 gradients stays float64, which torch refuses to narrow.
        dtype = torch.promote_types(group.dtype, torch.float32)
        self.values = torch.zeros(group.layout.num_blocks, dtype=dtype, device=group.device)

    def measure(self, slot: int, values: torch.Tensor, start: int = 0) -> None:
        """Measures some of this rank's shard of a bucket: whole blocks, the first of them at element `start`.

        Each row of the call is summed by itself, so a boundary cannot show.
        """
        first = self.partition.norms[slot][self.comm.rank].start + start // BLOCK_ELEMENTS
        rows = values.view(len(values) // BLOCK_ELEMENTS, BLOCK_ELEMENTS)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=self.values.dtype)
        self.values[first : first + len(rows)] = norms

    def parts(self, slot: int) -> list[list[torch.Tensor]]:
        """Returns whose norms of a bucket are where, for an all-gather."""
        return [[_slice(self.values, blocks)] for blocks in self.partition.norms[slot]]


class Reduction:
    """One group's exchange of one step, bucket by bucket, all in flight at once.

    Args:
        comm: The ranks.
        group: Whose gradients.
        plan: Who has which leaves.
        partition: Who owns what.
        own: The nodes of the tree that this rank holds.
    """

    def __init__(self, comm: Collectives, group: FlatGroup, plan: StepPlan, partition: Partition, own: Nodes) -> None:
        self.comm, self.group, self.plan, self.partition, self.own = comm, group, plan, partition, own
        self.nodes = [roots(block, plan.num_micro) for block in plan.blocks]
        self.norms = Norms(comm, group, partition)
        self.loans: list[Loan] = []
        self.pending: list[Pending] = []
        self.target: FlatBuffer | None = None
        self._at_once = CACHED_ELEMENTS if group.device.type == "cpu" else max(1, group.layout.total)

    def launch_all(self) -> None:
        """Starts all exchanges that have not been started."""
        while len(self.loans) < len(self.partition.buckets):
            self.launch_next()

    def launch_next(self) -> None:
        """Starts the next bucket's: each owner is sent its slice of all nodes that this rank holds."""
        slot = len(self.loans)
        rank, shards = self.comm.rank, self.partition.shards[slot]
        sends = [[_slice(buffer.flat, shard) for _, buffer in self.own] for shard in shards]
        sizes = [[] if peer == rank else [len(shards[rank])] * len(nodes) for peer, nodes in enumerate(self.nodes)]
        inbox, channel = partial(self.group.inbox, slot), GRADIENTS + self.group.number
        if self.partition.one_shot:  # all add up the same pieces, so each needs its own
            self.loans.append(CopiedLoan(self.comm.exchange_shards, rank, sends, sizes, inbox, channel))
        else:
            self.loans.append(self.comm.lend_shards(sends, sizes, inbox, channel))

    def drop(self) -> None:
        """Waits for what is under way and forgets it."""
        for loan in self.loans:
            loan.received()
            loan.done()
        for loan in self.loans:
            loan.drain()

    def divide_and_share(self, total: float, share: bool = True) -> None:
        """Adds this rank's shards in tree order, divides them, and starts to send them to all.

        Args:
            total: What the sum is divided by.
            share: False sends the norms only: each rank keeps the gradient of its own shards.
        """
        self.target = self.own[0][1] if self.own else self.group.buffer()
        self._begin_sums()
        for slot, loan in enumerate(self.loans):
            shards = self.partition.shards[slot]
            shard = shards[self.comm.rank]
            out = _slice(self.target.flat, shard)
            addends = self._addends(slot, shard)
            for start in range(0, len(shard), self._at_once):
                stop = start + self._at_once
                some, value = out[start:stop], self._add_up([(node, part[start:stop]) for node, part in addends])
                if total != 1.0 or some.data_ptr() != value.data_ptr():
                    torch.div(value, total, out=some)
                self.norms.measure(slot, some, start)
            loan.done()
            if not self.partition.one_shot and self.comm.world_size > 1:
                parts = self.norms.parts(slot)
                if share:
                    parts = [[_slice(self.target.flat, s), *part] for s, part in zip(shards, parts, strict=True)]
                self.pending.append(self.comm.all_gather(parts, channel=RESULTS))

    def _begin_sums(self) -> None:
        """Told once all is sent: the sums are next."""

    def _addends(self, slot: int, shard: range) -> Addends:
        """Waits for the others' parts of this rank's shard; returns all that there is to add up."""
        pieces = self.loans[slot].received()
        found = [(node, _slice(buffer.flat, shard)) for node, buffer in self.own]
        for nodes, parts in zip(self.nodes, pieces, strict=True):
            found += zip(nodes, parts, strict=False)  # this rank's own entry has no parts
        return found

    def _add_up(self, addends: Addends) -> torch.Tensor:
        tree: TreeAccumulator[torch.Tensor] = TreeAccumulator(self.plan.num_micro, torch.Tensor.add_)
        for node, part in addends:
            tree.add_node(node, part)
        return tree.result()

    def result(self) -> tuple[FlatBuffer, torch.Tensor]:
        """Waits for the others' shards; returns the gradient (whole if it is shared) and its blocks' norms."""
        # That the others' results are here says that they have done with what this rank lent.
        for arrival in self.pending:
            arrival.wait()
        if self.partition.one_shot:
            for loan in self.loans:
                loan.drain()
        assert self.target is not None
        for _, buffer in self.own[1:]:
            self.group.recycle(buffer)
        self.group.begin(self.plan.num_micro)
        return self.target, self.norms.values


def _slice(vector: torch.Tensor, part: range) -> torch.Tensor:
    return vector[part.start : part.stop]
