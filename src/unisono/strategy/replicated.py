"""`ddp`: every rank holds the whole model and runs the whole update; gradients are summed in tree order.

The sum is a reduce-scatter and an all-gather. Each rank owns a shard of every bucket: it receives the others'
partial sums of that shard, adds them in tree order, divides once, and sends the result to all. These are the
bytes of a ring all-reduce, with the order of additions in our hands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from unisono.comm.api import Collectives, Pending
from unisono.errors import InputError
from unisono.numerics.layout import BLOCK_ELEMENTS
from unisono.numerics.tree import TreeAccumulator, roots
from unisono.strategy.base import StepPlan, Strategy
from unisono.strategy.flat import BUCKET_BYTES, ONE_SHOT_BYTES, FlatBuffer, FlatGroup


class ReplicatedStrategy(Strategy):
    """See the module's docstring.

    Args:
        bucket_bytes: The unit of one exchange. The bits do not depend on it.
        one_shot_bytes: Gradients up to this size are exchanged whole, at once. The bits do not depend on it.
    """

    name = "ddp"

    def __init__(
        self,
        comm: Collectives,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        bucket_bytes: int = BUCKET_BYTES,
        one_shot_bytes: int = ONE_SHOT_BYTES,
    ) -> None:
        super().__init__(comm, optimizer, names)
        self._bucket_bytes, self._one_shot_bytes = bucket_bytes, one_shot_bytes
        self._members: list[int] = []
        self.groups: list[FlatGroup] = []
        self._partitions: list[_Partition] = []
        self._reductions: list[_Reduction] = []
        self._results: list[FlatBuffer] = []

    def begin_step(self, plan: StepPlan) -> None:
        self._adopt_parameters()
        for group, result in zip(self.groups, self._results, strict=False):
            group.recycle(result)
        self._results = []
        for group in self.groups:
            group.begin(plan.num_micro)

    def add_micro_batch(self, leaf: int, scale: float) -> None:
        for group in self.groups:
            group.add(leaf, scale)

    def launch(self, plan: StepPlan) -> None:
        pairs = zip(self.groups, self._partitions, strict=True)
        self._reductions = [_Reduction(self.comm, group, plan, partition) for group, partition in pairs]

    def complete(self, total: float, present: Sequence[bool], clip_norm: float | None) -> torch.Tensor:
        for reduction in self._reductions:
            reduction.divide_and_share(total)
        outcomes = [reduction.result() for reduction in self._reductions]
        squares = torch.cat([norms.double().square() for _, norms in outcomes])
        norm = squares.sum().sqrt()
        self._results = [result for result, _ in outcomes]
        position = 0
        for group, result in zip(self.groups, self._results, strict=True):
            if clip_norm is not None:
                # As torch.nn.utils.clip_grad_norm_ has it; by 1.0 where nothing is to clip, so no device waits.
                result.flat.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0).to(group.dtype))
            for param, view in zip(group.params, result.views, strict=True):
                param.grad = view if present[position] else None
                position += 1
        self._reductions = []
        return norm

    def presence(self) -> list[bool]:
        return [there for group in self.groups for there in group.present]

    def parameter_names(self) -> list[str]:
        return [segment.name for group in self.groups for segment in group.layout.segments]

    def _adopt_parameters(self) -> None:
        """Lays the trainable parameters out; again where the user froze, thawed or added some."""
        params = [p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad]
        members = [id(param) for param in params]
        if members == self._members:
            return
        if not params:
            raise InputError("the optimizer has no trainable parameter: pass it some, with requires_grad=True")
        self._members, self._results = members, []
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for number, param in reversed(list(enumerate(params))):
            kinds[param.dtype, param.device].append((self.names.get(id(param), f"parameter {number}"), param))
        self.groups = [FlatGroup(named, self._bucket_bytes) for named in kinds.values()]
        one_shot = sum(group.num_bytes for group in self.groups) <= self._one_shot_bytes
        self._partitions = [_Partition(group, self.comm, one_shot) for group in self.groups]


class _Partition:
    """Who owns what of a group: fixed until the parameters change, so worked out once."""

    def __init__(self, group: FlatGroup, comm: Collectives, one_shot: bool) -> None:
        layout, self.one_shot = group.layout, one_shot
        self.buckets = [range(layout.total)] if one_shot else group.buckets
        self.shards = [
            [bucket] * comm.world_size if one_shot else layout.shards(bucket, comm.world_size)
            for bucket in self.buckets
        ]
        self.norms = [[layout.blocks_in(shard) for shard in shards] for shards in self.shards]


class _Reduction:
    """One group's exchange of one step, bucket by bucket, all in flight at once."""

    def __init__(self, comm: Collectives, group: FlatGroup, plan: StepPlan, partition: _Partition) -> None:
        self.comm, self.group, self.plan, self.partition = comm, group, plan, partition
        self.own = list(group.tree.items())
        self.nodes = [roots(block, plan.num_micro) for block in plan.blocks]
        # At least float32; a norm of float64 gradients stays float64, which torch refuses to narrow.
        norms_dtype = torch.promote_types(group.dtype, torch.float32)
        self.norms = torch.zeros(group.layout.num_blocks, dtype=norms_dtype, device=group.device)
        self.inboxes: list[list[list[torch.Tensor]]] = []
        self.pending: list[Pending] = [self._exchange(slot) for slot in range(len(partition.buckets))]
        self.target: FlatBuffer | None = None

    def _exchange(self, slot: int) -> Pending:
        """Starts to send each owner its slice of all nodes that this rank holds."""
        rank, shards = self.comm.rank, self.partition.shards[slot]
        sends = [[_slice(buffer.flat, shard) for _, buffer in self.own] for shard in shards]
        length = len(shards[rank])
        counts = [0 if peer == rank else len(nodes) for peer, nodes in enumerate(self.nodes)]
        memory = self.group.inbox(slot, sum(counts) * length)
        receives, offset = [], 0
        for count in counts:
            receives.append([memory[offset + k * length : offset + (k + 1) * length] for k in range(count)])
            offset += count * length
        self.inboxes.append(receives)
        return self.comm.exchange_shards(sends, receives)

    def divide_and_share(self, total: float) -> None:
        """Adds this rank's shards in tree order, divides them, and starts to send them to all."""
        self.target = self.own[0][1] if self.own else self.group.buffer()
        for slot, arrival in enumerate(self.pending):
            arrival.wait()
            shards, norms = self.partition.shards[slot], self.partition.norms[slot]
            shard = shards[self.comm.rank]
            if len(shard):
                out, value = _slice(self.target.flat, shard), self._add_up(slot, shard)
                if total != 1.0 or out.data_ptr() != value.data_ptr():
                    torch.div(value, total, out=out)
                self._measure(shard, norms[self.comm.rank])
            if not self.partition.one_shot and self.comm.world_size > 1:
                parts = [
                    [_slice(self.target.flat, s), _slice(self.norms, n)] for s, n in zip(shards, norms, strict=True)
                ]
                self.pending[slot] = self.comm.all_gather(parts)

    def _add_up(self, slot: int, shard: range) -> torch.Tensor:
        tree: TreeAccumulator[torch.Tensor] = TreeAccumulator(self.plan.num_micro, torch.Tensor.add_)
        for node, buffer in self.own:
            tree.add_node(node, _slice(buffer.flat, shard))
        for nodes, parts in zip(self.nodes, self.inboxes[slot], strict=True):
            for node, part in zip(nodes, parts, strict=False):  # this rank's own entry has no parts
                tree.add_node(node, part)
        return tree.result()

    def _measure(self, shard: range, blocks: range) -> None:
        """Norms of the shard's blocks. Each row of the call is summed by itself, so a boundary cannot show."""
        assert self.target is not None
        whole = len(shard) // BLOCK_ELEMENTS
        middle = shard.start + whole * BLOCK_ELEMENTS
        if whole:
            rows = _slice(self.target.flat, range(shard.start, middle)).view(whole, BLOCK_ELEMENTS)
            norms = _slice(self.norms, range(blocks.start, blocks.start + whole))
            norms.copy_(torch.linalg.vector_norm(rows, dim=1, dtype=self.norms.dtype))
        if middle < shard.stop:
            rest = _slice(self.target.flat, range(middle, shard.stop))
            self.norms[blocks.stop - 1] = torch.linalg.vector_norm(rest, dtype=self.norms.dtype)

    def result(self) -> tuple[FlatBuffer, torch.Tensor]:
        """Waits for the others' shards; returns the whole gradient and its blocks' norms."""
        for arrival in self.pending:
            arrival.wait()
        assert self.target is not None
        for _, buffer in self.own[1:]:
            self.group.recycle(buffer)
        self.group.begin(self.plan.num_micro)
        return self.target, self.norms


def _slice(vector: torch.Tensor, part: range) -> torch.Tensor:
    return vector[part.start : part.stop]
