"""GroupedStrategy: parameters in flat groups. What all strategies have in common that lay gradients out flat."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from unisono.strategy.base import Setup, StepPlan, Strategy
from unisono.strategy.flat import FlatGroup
from unisono.strategy.pieces import Pieces
from unisono.strategy.reduction import Partition
from unisono.strategy.saved import HeldState


class GroupedStrategy(Strategy):
    """See the module's docstring.

    Groups are only ever added: a parameter that is frozen again keeps its place, and its zeros travel on, so that
    shards, and the optimizer state that belongs to them, stay where they are.

    Attributes:
        groups: In the order of their exchanges.
    """

    whole_segments: ClassVar[bool] = False
    """Whether buckets are cut between parameters only."""
    shards_state: ClassVar[bool] = True
    """Whether other ranks update what this one does not."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._members: set[int] = set()
        self.groups: list[FlatGroup] = []
        self._pieces = Pieces(
            self.comm, self.optimizer, sharded=self.shards_state, masters=setup.masters, offload=setup.offload
        )
        self._norm_order: torch.Tensor | None = None

    @abstractmethod
    def _partition(self, group: FlatGroup) -> Partition:
        """Says who owns what of a new group."""

    @abstractmethod
    def _begin_group(self, group: FlatGroup, partition: Partition, plan: StepPlan) -> None:
        """Prepares the exchange of a new group, in a step that has begun."""

    def adopt_newcomers(self, plan: StepPlan) -> None:
        known = self._members
        strangers = [(n, param) for n, param in enumerate(self._params()) if id(param) not in known]
        kinds: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for number, param in reversed(strangers):
            if id(param) not in known and (param.requires_grad or param.grad is not None):
                known.add(id(param))
                kinds[self._kind(param)].append((self.setup.names.get(id(param), f"parameter {number}"), param))
        for _, named in sorted(kinds.items(), key=lambda item: item[0][0]):
            group = FlatGroup(named, self.setup.bucket_bytes, len(self.groups), self.whole_segments, self.comm.empty)
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

    def update(self, step: Callable[[], Any]) -> None:
        self._pieces.update(step)

    def held_state(self) -> HeldState:
        return super().held_state() if self._pieces.empty else self._pieces.held()

    def own_state(self, param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        # Where it will be cut, only a part is ever read.
        return state if self.shards_state else super().own_state(param, state)

    def forget_state(self) -> None:
        super().forget_state()
        self._pieces.forget()

    def presence(self) -> list[bool]:
        return [there for group in self.groups for there in group.present]

    def parameter_names(self) -> list[str]:
        return [segment.name for group in self.groups for segment in group.layout.segments]


def clip_factor(norm: torch.Tensor, clip_norm: float, group: FlatGroup) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_` has it: 1.0 where nothing is to clip, so that no device waits.

    Of at least float32: rounded to 16 bits, it would shrink all gradients by up to 0.4 % too much or too little. Where
    the norm is no number it is 1.0: the step is left out, and the padding, kept from step to step, has to stay 0.
    """
    factor: torch.Tensor = (clip_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
    return factor.to(group.device, torch.promote_types(group.dtype, torch.float32))
