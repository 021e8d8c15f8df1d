"""`zero3` and `hsdp`: weights are sharded too.

(ZeRO stage 3: Rajbhandari et al. 2020, section 5.3; FSDP: Zhao et al. 2023.)

A unit (a repeated block of the model, or all that is in none) is gathered before its forward, given back after it,
and gathered once more before its backward. Parameters stay the model's own objects under their own names: between
uses they show a tensor of NaN in their shape, which cannot be written to.

Not built on `torch.distributed.fsdp.fully_shard`: see docs/design/0005-zero3.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unisono.data.tensors import map_tensors
from unisono.errors import InputError
from unisono.strategy.base import Setup, StepPlan
from unisono.strategy.blocks import repeated_blocks
from unisono.strategy.flat import FlatGroup
from unisono.strategy.pieces import is_elementwise
from unisono.strategy.reduction import Partition
from unisono.strategy.rounds import Rounds
from unisono.strategy.saved import Held
from unisono.strategy.sharded import GradientShardedStrategy
from unisono.strategy.team import Team
from unisono.strategy.weights import FlatWeights

REST = -1


class _Unit:
    """What is gathered together.

    Attributes:
        weights: One for each dtype and device.
        rounds: The exchanges of their gradients.
    """

    def __init__(self) -> None:
        self.weights: list[FlatWeights] = []
        self.rounds: list[Rounds] = []

    def gather(self) -> None:
        for weights in self.weights:
            weights.gather()

    def free(self) -> None:
        for weights in self.weights:
            weights.free()


class _Sweep:
    """The blocks of one model, gathered in one order on all ranks: forwards, then backwards.

    A gather takes all ranks. One whose data took another way past some blocks (experts) gathers these too, and frees
    them at once, before it goes on: so nobody waits for it. Blocks that come again, or out of order, are gathered where
    they come, which then has to be alike on all ranks.
    """

    def __init__(self) -> None:
        self.units: list[_Unit] = []
        self._next = 0
        self._left: int | None = None  # of the backward pass, from the last one down

    def forward(self, unit: _Unit) -> None:
        """Gathers a block for its forward, and lets those before it pass by."""
        place = self.units.index(unit)
        if place >= self._next:
            self._pass(self.units[self._next : place])
            self._next = place + 1
        unit.gather()

    def end_forward(self) -> None:
        """Lets the rest pass by."""
        self._pass(self.units[self._next :])
        self._next = 0
        if torch.is_grad_enabled():
            self._left = len(self.units)

    def backward(self, unit: _Unit) -> None:
        """Gathers a block for its backward, and lets those after it pass by."""
        place = self.units.index(unit)
        if self._left is not None and place < self._left:
            self._pass(self.units[place + 1 : self._left][::-1], backward=True)
            self._left = place
        unit.gather()

    def end(self) -> None:
        """Ends the micro-batch: what no backward has come to passes by."""
        if self._left is not None:
            self._pass(self.units[: self._left][::-1], backward=True)
        self._next, self._left = 0, None

    def _pass(self, units: Sequence[_Unit], backward: bool = False) -> None:
        for unit in units:
            unit.gather()
            unit.free()
            for rounds in unit.rounds if backward else ():
                rounds.pass_by()  # or its owner would wait for gradients that do not come before the end


class FullyShardedStrategy(GradientShardedStrategy):
    """See the module's docstring. All ranks keep one copy of the weights together, or `shard_size` neighbours."""

    name = "zero3"
    shards_weights = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._shard_size = self.comm.world_size if setup.shard_size is None else setup.shard_size
        self._units: dict[int, _Unit] = {REST: _Unit()}
        self._numbers: dict[int, int] = {}
        self._sweeps: list[_Sweep] = []
        self._backward: _Unit | None = None
        self._held = self._streams = False

    def attach(self, models: Sequence[nn.Module]) -> None:
        if self._shard_size == 1:
            return
        holders: dict[int, set[int]] = {}
        for model in models:
            blocks, sweep = repeated_blocks(model), _Sweep()
            self._sweeps.append(sweep)
            inside = {}
            for block in blocks:
                number = len(self._units)
                self._units[number] = _Unit()
                inside.update({id(module): number for module in block.modules()})
                sweep.units.append(self._units[number])
                block.register_forward_pre_hook(self._before_forward(sweep, self._units[number]))
                block.register_forward_hook(self._after_forward(sweep, self._units[number]), always_call=True)
            for module in model.modules():
                number = inside.get(id(module), REST)
                own = list(module.parameters(recurse=False))
                for param in own:
                    holders.setdefault(id(param), set()).add(number)
                if own and number == REST:
                    module.register_forward_pre_hook(lambda module, args: self._units[REST].gather())
            model.register_forward_hook(self._after_model(sweep))
            model.register_state_dict_pre_hook(self._check_state_dict)  # type: ignore[no-untyped-call]
        # A parameter that two blocks share, or a block and the rest, is there for both.
        self._numbers = {key: min(found) if len(found) == 1 else REST for key, found in holders.items()}

    def _kind(self, param: torch.Tensor) -> tuple[Any, ...]:
        # In the order of backward: the last block first, and what is in none, which begins and ends, last.
        number = self._numbers.get(id(param), REST)
        return (-number if number != REST else 1, *super()._kind(param)[1:])

    def _weights_of(self, group: FlatGroup) -> FlatWeights:
        unit = self._units[self._numbers.get(id(group.params[0]), REST)]
        team = Team(self.comm.rank, self.comm.world_size, self._shard_size)
        partition = Partition(group, self.comm, whole=not is_elementwise(self.optimizer), team=team)
        unit.weights.append(FlatWeights(self.comm, group, partition, team))
        if self._held:
            unit.gather()
        return unit.weights[-1]

    def _begin_group(self, group: FlatGroup, partition: Partition, plan: StepPlan) -> None:
        super()._begin_group(group, partition, plan)
        self._units[self._numbers.get(id(group.params[0]), REST)].rounds.append(self._rounds[-1])

    # Hooks

    def _before_forward(self, sweep: _Sweep, unit: _Unit) -> Callable[..., None]:
        def gather(module: nn.Module, args: Any) -> None:
            if unit is not self._backward and not self._held:  # else it is a checkpoint's second forward, or all there
                sweep.forward(unit)

        return gather

    def _after_forward(self, sweep: _Sweep, unit: _Unit) -> Callable[..., None]:
        def free(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                _on_gradient(output, lambda: self._before_backward(sweep, unit))
            if not self._held and unit is not self._backward:
                unit.free()

        return free

    def _before_backward(self, sweep: _Sweep, unit: _Unit) -> None:
        """The gradient of a unit's output is there, so what came after it in the forward is done."""
        if unit is not self._backward:
            if self._backward is not None and not self._held:
                self._backward.free()
            self._backward = unit
            sweep.backward(unit)

    def _after_model(self, sweep: _Sweep) -> Callable[..., None]:
        def end(module: nn.Module, args: Any, output: Any) -> None:
            if not self._held:
                sweep.end_forward()
            if not torch.is_grad_enabled() and not self._held:
                self._units[REST].free()

        return end

    def _check_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._streams and not all(weights.gathered for unit in self._units.values() for weights in unit.weights):
            raise InputError(
                "model.state_dict() under zero3 has no weights to give, each rank holds a part: call run.state() on "
                "every rank, or use `with run.whole():`"
            )

    def _end_micro_batch(self) -> None:
        for sweep in self._sweeps:
            sweep.end()
        self._free_all()

    def begin_micro_batch(self) -> None:
        self._end_micro_batch()  # a GAN's critic works on after its own step, in the generator's loss

    def _free_all(self) -> None:
        self._backward = None
        if not self._held:
            for unit in self._units.values():
                unit.free()

    def add_micro_batch(self, plan: StepPlan, leaf: int | None, scale: float) -> None:
        self._end_micro_batch()
        super().add_micro_batch(plan, leaf, scale)

    def skip_micro_batch(self, plan: StepPlan) -> None:
        self._end_micro_batch()
        super().skip_micro_batch(plan)

    @contextmanager
    def whole(self) -> Iterator[None]:
        for unit in self._units.values():
            unit.gather()
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before
            for weights in (weights for unit in self._units.values() for weights in unit.weights):
                weights.keep()
            self._free_all()

    def held_weights(self) -> dict[int, Held]:
        found = {}
        for weights in (weights for unit in self._units.values() for weights in unit.weights if not weights.resident):
            if weights.gathered:
                weights.keep()
            found.update(weights.held())
        return found

    @contextmanager
    def streaming(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        units = {id(p): unit for unit in self._units.values() for w in unit.weights for p in w.group.params}
        last: _Unit | None = None

        def fetch(param: torch.Tensor) -> torch.Tensor:
            nonlocal last
            unit = units.get(id(param))
            if unit is None:
                return param
            if not self._held and unit is not last:
                if last is not None:
                    last.free()
                unit.gather()
                last = unit
            return param.detach().clone()  # numpy, where it goes, would keep the memory from being given back

        self._streams = True
        try:
            yield fetch
        finally:
            self._streams = False
            if last is not None:
                last.free()

    def update(self, step: Callable[[], Any]) -> None:
        self._free_all()  # what was gathered would be old
        super().update(step)


class HybridShardedStrategy(FullyShardedStrategy):
    """`hsdp`: weights are sharded inside of a team of ranks and copied between teams (Zhao et al. 2023, section 3.2.2).

    Gathers stay inside of the team (a host, say). Gradients and optimizer state are sharded over all ranks.
    """

    name = "hsdp"


def _on_gradient(output: Any, then: Callable[[], None]) -> None:
    def watch(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: then())  # type: ignore[no-untyped-call]
        return tensor

    map_tensors(watch, output)
