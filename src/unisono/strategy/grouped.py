"""GroupedStrategy: parameters in flat groups. What all strategies have in common that lay gradients out flat."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from unisono.comm.api import Collectives
from unisono.strategy.base import StepPlan, Strategy
from unisono.strategy.flat import BUCKET_BYTES, FlatGroup
from unisono.strategy.reduction import Partition


class GroupedStrategy(Strategy):
    """See the module's docstring.

    Groups are only ever added: a parameter that is frozen again keeps its place, and its zeros travel on, so that
    shards, and the optimizer state that belongs to them, stay where they are.

    Args:
        bucket_bytes: The unit of one exchange. The bits do not depend on it.
    """

    whole_segments: ClassVar[bool] = False

    def __init__(
        self,
        comm: Collectives,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(comm, optimizer, names)
        self._bucket_bytes = bucket_bytes
        self._members: set[int] = set()
        self.groups: list[FlatGroup] = []
        self._norm_order: torch.Tensor | None = None

    @abstractmethod
    def _partition(self, group: FlatGroup) -> Partition:
        """Says who owns what of a new group."""

    @abstractmethod
    def _begin_group(self, group: FlatGroup, partition: Partition, plan: StepPlan) -> None:
        """Prepares the exchange of a new group, in a step that has begun."""

    def adopt_newcomers(self, plan: StepPlan) -> None:
        kinds: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for number, param in reversed(list(enumerate(self._params()))):
            if id(param) not in self._members and (param.requires_grad or param.grad is not None):
                self._members.add(id(param))
                kinds[self._kind(param)].append((self.names.get(id(param), f"parameter {number}"), param))
        for _, named in sorted(kinds.items(), key=lambda item: item[0][0]):
            group = FlatGroup(named, self._bucket_bytes, len(self.groups), self.whole_segments)
            self.groups.append(group)
            self._norm_order = None
            self._begin_group(group, self._partition(group), plan)

    def _kind(self, param: torch.Tensor) -> tuple[Any, ...]:
        """Returns what the parameters of a group have in common; the first entry orders the groups."""
        return 0, param.dtype, param.device

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _whole_norm(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of the blocks' norms, in the optimizer's order of parameters: no grouping can show in it."""
        if not norms:
            return torch.zeros((), dtype=torch.float64)
        device = norms[0].device
        values = torch.cat([part.to(device) for part in norms]) if len(norms) > 1 else norms[0]
        if self._norm_order is None:
            blocks, start = {}, 0
            for group in self.groups:
                for param, segment in zip(group.params, group.layout.segments, strict=True):
                    part = group.layout.blocks_in(range(segment.offset, segment.stop))
                    blocks[id(param)] = range(start + part.start, start + part.stop)
                start += group.layout.num_blocks
            order = [block for param in self._params() for block in blocks.get(id(param), ())]
            self._norm_order = torch.tensor(order, dtype=torch.long, device=device)
        norm: torch.Tensor = torch.linalg.vector_norm(values.index_select(0, self._norm_order).double())
        return norm

    def presence(self) -> list[bool]:
        return [there for group in self.groups for there in group.present]

    def parameter_names(self) -> list[str]:
        return [segment.name for group in self.groups for segment in group.layout.segments]


def clip_factor(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_` has it: 1.0 where nothing is to clip, so that no device waits."""
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0)
