"""Stepper: from micro-batches to optimizer steps.

The loader announces each micro-batch (`begin`), the user's loop calls `optimizer.step()` once for each, and at a
step's last one the ranks exchange what they have. With one optimizer that happens inside `optimizer.step()`.
With several (a GAN) it happens when the micro-batch ends: an update in the middle of it would be seen by the
other model's forward in some micro-batches and not in others, which ones would depend on the world size.
Where the recipe has one micro-batch a step, there is nothing to depend on, and each update is done at once,
as in plain PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unisono.comm.api import Collectives
from unisono.data.schedule import MicroBatch, Schedule
from unisono.errors import CommError, InputError, Interrupted
from unisono.numerics.seeds import derive_seed, seed_all
from unisono.observe.events import StepOutcome
from unisono.observe.timer import PhaseTimer
from unisono.strategy.base import StepPlan
from unisono.strategy.buffers import ModelBuffers
from unisono.strategy.extras import ExtrasExchange, RankStep
from unisono.strategy.unit import Unit
from unisono.strategy.values import StepValues, average, read_later


@dataclass
class _Waiting:
    """A finished step whose values have not been exchanged yet."""

    values: StepValues
    counts: list[int]
    scales: list[list[list[float]]]
    outcome: Callable[[dict[str, float]], StepOutcome]


class Stepper:
    """See the module's docstring.

    Args:
        comm: The ranks.
        device: Where models run.
        seed: Of the forward passes.
        timer: Told of each phase.
        on_step: Called after every step, on every rank.
        on_note: Called with a sentence for the user.
        lag: How many steps later logged values are read: 0 on a CPU, 1 where reading would stall the device.
    """

    def __init__(
        self,
        comm: Collectives,
        device: torch.device,
        *,
        seed: int,
        timer: PhaseTimer,
        on_step: Callable[[StepOutcome], None] = lambda outcome: None,
        on_note: Callable[[str], None] = lambda note: None,
        lag: int | None = None,
    ) -> None:
        self.comm, self.device, self.seed, self.timer = comm, device, seed, timer
        self.units: list[Unit] = []
        self.step = 0
        self.epoch = 0
        self.stop_requested = self.stopping = False
        self.micro: MicroBatch | None = None
        self._on_step, self._on_note = on_step, on_note
        self._lag = int(device.type != "cpu") if lag is None else lag
        self._models: list[nn.Module] = []
        self._buffers: ModelBuffers | None = None
        self._schedule: Schedule | None = None
        self._plan: StepPlan | None = None
        self._extras: tuple[tuple[Any, ...], ExtrasExchange] | None = None
        self._values = StepValues(device)
        self._waiting: list[_Waiting] = []
        self._weight: float | None = None
        self._done = True  # whether the present micro-batch needs nothing more
        self._next = (0, 0, 0)  # what follows the present micro-batch, if it is not the step's last
        self._norm: torch.Tensor | None = None
        self._lr = math.nan
        self._stepped_at_once = False  # whether optimizers were updated before the step's end
        self._count = 0  # micro-batches of the present step that this rank has begun

    def add_unit(self, unit: Unit) -> None:
        """Takes in one more optimizer."""
        self.units.append(unit)

    def add_model(self, model: nn.Module) -> None:
        """Takes in a model whose buffers are to be kept the same."""
        if not any(model is known for known in self._models):
            self._models.append(model)
            self._buffers = None

    def begin(self, epoch: int, micro: MicroBatch, schedule: Schedule) -> None:
        """Starts a micro-batch: gradients cleared, buffers at the step's values, generators seeded.

        Raises:
            Interrupted: a rank was told to stop, and the step has ended.
        """
        if self._joins(micro, schedule):  # a second loader, zipped with the first: its part of the same micro-batch
            self._seed(micro)
            return
        self.settle()
        if self.stopping:
            raise Interrupted(f"stopped after step {self.step}")
        if self._count and (epoch, micro.step, micro.index) != self._next:
            self._on_note(f"the loop was left inside step {self.step}: its gradients are dropped")
            self._count = 0
        if self._count == 0:
            self._begin_step(micro, schedule)
        self._next = (epoch, micro.step, micro.index + 1)
        self.micro, self.epoch, self._done, self._weight = micro, epoch, False, None
        self._count += 1
        self._clear()
        if self._buffers is None:
            self._buffers = ModelBuffers(self.comm, self._models)
        self._buffers.begin_micro_batch()
        self._values.begin_micro_batch()
        if self._plan is not None and self._may_send_early(micro):
            self.units[0].strategy.expect_backward(self._plan, micro.index, self._scale)
        self._seed(micro)

    def _may_send_early(self, micro: MicroBatch) -> bool:
        """Where this rank has one micro-batch in the step, and nobody else's backward can reach the gradients."""
        alone = len(self.units) == 1 and self.comm.world_size > 1
        return alone and self._count == 1 and micro.is_last and not micro.shadow

    def _scale(self) -> float:
        """Relative to the micro-batch size, so that a full micro-batch has scale 1 and needs no multiplication."""
        assert self._schedule is not None
        return self.weight / self._schedule.micro_batch

    def _seed(self, micro: MicroBatch) -> None:
        seed_all(derive_seed(self.seed, "micro-batch", self.step, micro.index), self.device)
        self.timer.enter("forward")

    def _joins(self, micro: MicroBatch, schedule: Schedule) -> bool:
        now = self.micro
        if now is None or self._done or schedule is self._schedule or self.stepped_here:
            return False
        if (now.index, now.num_micro, now.is_last) != (micro.index, micro.num_micro, micro.is_last):
            raise InputError(
                "two loaders in one loop must go in step: give both datasets the same length, global_batch and "
                "micro_batch"
            )
        return True

    @property
    def stepped_here(self) -> bool:
        """Whether an optimizer was stepped in the present micro-batch."""
        return any(len(unit.scales) >= self._count for unit in self.units)

    def _begin_step(self, micro: MicroBatch, schedule: Schedule) -> None:
        blocks = schedule.blocks(micro.step, self.comm.world_size)
        self._plan, self._schedule = StepPlan(micro.num_micro, blocks), schedule
        self._values = StepValues(self.device)
        self._norm, self._lr, self._stepped_at_once = None, math.nan, False
        self._clear()
        for unit in self.units:
            unit.scales, unit.rates = [], unit.rates_now()
            unit.strategy.begin_step(self._plan)

    def _clear(self) -> None:
        for unit in self.units:
            for group in unit.strategy.optimizer.param_groups:
                for param in group["params"]:
                    param.grad = None

    @property
    def weight(self) -> float:
        """Of the present micro-batch: its number of samples, unless the user gave another."""
        assert self.micro is not None
        return float(self.micro.num_samples) if self._weight is None else self._weight

    @property
    def finished(self) -> bool:
        """Whether the present micro-batch ended its step."""
        return self._done and self._count == 0

    def set_weight(self, weight: float) -> None:
        """Weighs the present micro-batch, until the next `optimizer.step()`."""
        if not (weight >= 0 and math.isfinite(weight)):
            raise InputError(f"the weight of {self.where()} is {weight!r}: it must be a finite number, 0 or more")
        self._weight = weight

    def log(self, values: dict[str, Any]) -> None:
        """Notes values of the present micro-batch."""
        if self.micro is not None and not self._done:
            self._values.log(values)

    def where(self) -> str:
        """Names the present micro-batch for a message."""
        return "no step" if self.micro is None else f"step {self.step}, micro-batch {self.micro.index}"

    def request(self, unit: Unit, closure: Callable[[], Any] | None = None) -> Any:
        """What `optimizer.step()` does: takes the gradients in, and at the step's last micro-batch updates.

        Raises:
            InputError: outside of the loader's loop, or a second time in one micro-batch.
        """
        micro, schedule = self.micro, self._schedule
        if micro is None or schedule is None or self._done or len(unit.scales) >= self._count:
            raise InputError(
                "optimizer.step() was called outside of the prepared loader's loop, or twice in one micro-batch: "
                "call it once for each batch of the loader; unisono does the accumulation"
            )
        self._check_unit(unit, self._count - 1)
        if self._count > 1 and unit.rates != unit.rates_now()[: len(unit.rates)]:
            raise InputError(
                f"a learning rate changed inside of step {self.step}: its micro-batches are one update. Pass the "
                "scheduler to prepare(schedule=...), or step it `if run.step_done`"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.timer.enter("reduce")
        scale, self._weight = self._scale(), None
        unit.scales.append(scale)
        if not micro.shadow:
            unit.strategy.add_micro_batch(micro.index, scale)
        alone = len(self.units) == 1
        if (alone and micro.is_last) or schedule.full_num_micro == 1:
            self._stepped_at_once = not alone
            self._finish([unit], last=alone)
        self.timer.enter("forward" if len(self.units) > 1 else None)
        return loss

    def settle(self) -> None:
        """Ends the present micro-batch; collective if it was the step's last and updates are due.

        Raises:
            InputError: an optimizer was stepped in some micro-batches of the step and not in others.
        """
        if self.micro is None:
            return
        micro, self.micro = self.micro, None
        if self._done:
            return
        self.micro = micro
        try:
            for unit in self.units:
                if unit.scales:
                    self._check_unit(unit, self._count)
            if micro.is_last:
                at_once = self._schedule is not None and self._schedule.full_num_micro == 1
                self._finish([] if at_once else [unit for unit in self.units if unit.scales], last=True)
            elif not micro.shadow and self._buffers is not None:
                self._buffers.end_micro_batch(micro.index, micro.num_micro)
        finally:
            self.micro, self._done = None, True

    def _check_unit(self, unit: Unit, expected: int) -> None:
        if len(unit.scales) != expected:
            raise InputError(
                f"optimizer.step() was called in some micro-batches of step {self.step} and not in others (rank "
                f"{self.comm.rank}): call it for every batch of the loader, unisono does the accumulation; "
                "to update only in some steps, decide by `run.step`, which is the same on every rank"
            )

    def abandon(self) -> None:
        """Forgets the present micro-batch: the run has failed, and nobody may be waited for."""
        self.micro, self._done = None, True

    def _finish(self, units: Sequence[Unit], *, last: bool) -> None:
        """Collective: reduces and updates `units`; `last` also ends the step."""
        micro, plan, buffers = self.micro, self._plan, self._buffers
        assert micro is not None and plan is not None and buffers is not None
        self.timer.enter("reduce")
        if last and not micro.shadow:
            buffers.end_micro_batch(micro.index, micro.num_micro)
        if last:
            self._values.start_copy()
        extras = self._extras_exchange()
        pending = extras.launch(self._mine(units))
        for unit in units:
            unit.strategy.launch(plan)
        if last:
            buffers.launch(plan)
        ranks = extras.read(pending, plan.blocks)
        self._check(ranks)
        for unit in units:
            if any(rank.resend for rank in ranks):
                unit.strategy.resend(plan)
            lr = float(unit.strategy.optimizer.param_groups[0]["lr"])
            norm = self._update(unit, ranks)
            if unit is self.units[0]:
                self._norm, self._lr = norm, lr
        if last:
            buffers.complete(plan, any(rank.quiet_changed for rank in ranks))
            self._end_step(ranks)

    def _extras_exchange(self) -> ExtrasExchange:
        assert self._schedule is not None
        sizes = tuple(len(unit.strategy.parameter_names()) for unit in self.units)
        max_block = -(-self._schedule.full_num_micro // self.comm.world_size)
        if self._extras is None or self._extras[0] != (max_block, sizes):
            self._extras = ((max_block, sizes), ExtrasExchange(self.comm, max_block, sizes))
        return self._extras[1]

    def _mine(self, units: Sequence[Unit]) -> RankStep:
        shadow = self.micro is not None and self.micro.shadow
        told = self._waiting[0].values if self._lag and self._waiting else self._values
        ready = told is not self._values or not self._lag
        return RankStep(
            step=self.step,
            names=told.names_hash if ready else 0,
            units=sum(1 << k for k, unit in enumerate(self.units) if any(unit is u for u in units)),
            stop=self.stop_requested,
            quiet_changed=self._buffers is not None and self._buffers.quiet_changed,
            resend=any(unit.strategy.must_resend for unit in units),
            scales=[[] if shadow else unit.scales for unit in self.units],
            values=told.read() if ready else [],
            present=[unit.strategy.presence() for unit in self.units],
        )

    def _check(self, ranks: Sequence[RankStep]) -> None:
        mine = ranks[self.comm.rank]
        for rank, other in enumerate(ranks):
            if other.units != mine.units:
                raise CommError(
                    f"in step {self.step} rank {rank} stepped other optimizers than rank {self.comm.rank}: decide "
                    "by `run.step`, which is the same on every rank"
                )

    def _update(self, unit: Unit, ranks: Sequence[RankStep]) -> torch.Tensor:
        number = next(k for k, other in enumerate(self.units) if other is unit)
        total = math.fsum(scale for rank in ranks for scale in rank.scales[number])
        present = [any(bits) for bits in zip(*(rank.present[number] for rank in ranks), strict=True)]
        norm = unit.strategy.complete(total or 1.0, present, unit.clip_norm)
        if not unit.named_unused and not all(present):
            pairs = zip(unit.strategy.parameter_names(), present, strict=True)
            unused = sorted(name for name, there in pairs if not there)
            if total > 0 and not any(present):
                raise InputError(
                    "no parameter of the optimizer got a gradient in its first step: was it made from this model's "
                    "parameters, and is loss.backward() called before optimizer.step()?"
                )
            self._on_note(f"no gradient in the first step for: {', '.join(unused[:8])}{' ...' * (len(unused) > 8)}")
        unit.named_unused = True
        if not self._lag and not math.isfinite(norm.item()):
            raise InputError(
                f"the gradient of step {self.step} is not finite (norm {norm.item()}); "
                "the weights are as they were before it: lower the learning rate, or clip_norm"
            )
        self.timer.enter("optimizer")
        if total > 0:
            unit.update()
        for schedule in unit.schedules:
            schedule()
        self.timer.enter("reduce")
        return norm

    def _end_step(self, ranks: Sequence[RankStep]) -> None:
        assert self._plan is not None and self._schedule is not None and self.micro is not None
        self._count, self._done = 0, True
        self.stopping = self.stopping or any(rank.stop for rank in ranks)
        if not any(rank.units for rank in ranks) and not self._stepped_at_once:
            return  # nobody stepped anything: batches were only looked at, and that is no step
        self.step += 1
        step, epoch, times, size = self.step, self.epoch, self.timer.take(), self._schedule.step_size(self.micro.step)
        norm = None if self._norm is None else read_later(self._norm)
        lr = self._lr

        def outcome(values: dict[str, float]) -> StepOutcome:
            grad_norm = None if norm is None else lambda: float(norm())
            return StepOutcome(step, epoch, size, grad_norm, lr, values, times)

        counts = [len(block) for block in self._plan.blocks]
        self._waiting.append(_Waiting(self._values, counts, [rank.scales for rank in ranks], outcome))
        if not self._lag or len(self._waiting) > 1:
            self._tell(self._waiting.pop(0), ranks)

    def _tell(self, waiting: _Waiting, ranks: Sequence[RankStep]) -> None:
        names = waiting.values.names
        if len({rank.names for rank in ranks}) > 1:
            raise InputError(
                f"ranks log values of different names (rank {self.comm.rank}: {names}): log the same on every rank"
            )
        rows = [
            RankStep(rank.step, scales=scales, values=rank.values)
            for rank, scales in zip(ranks, waiting.scales, strict=True)
        ]
        self._on_step(waiting.outcome(average(names, rows, waiting.counts)))

    def flush(self) -> None:
        """Collective: tells of steps whose values still wait."""
        while self._waiting:
            waiting = self._waiting.pop(0)
            told = RankStep(self.step, waiting.values.names_hash, values=waiting.values.read())
            self._tell(waiting, self.comm.gather_objects(told))
