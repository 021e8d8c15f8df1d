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
from typing import Any

import torch
from torch import nn

from unisono.comm.api import Collectives
from unisono.data.schedule import MicroBatch, Schedule
from unisono.errors import InputError, Interrupted
from unisono.numerics.seeds import derive_seed, seed_all
from unisono.observe.events import StepOutcome
from unisono.observe.timer import PhaseTimer
from unisono.strategy.backward import backward
from unisono.strategy.base import StepPlan
from unisono.strategy.buffers import ModelBuffers
from unisono.strategy.exchange import Ending, Exchange
from unisono.strategy.extras import RankStep, loads
from unisono.strategy.loss_scale import LossScale
from unisono.strategy.outcomes import Outcomes
from unisono.strategy.parity import Watch, check_alike, check_stepped, check_taken, is_due, unprepared
from unisono.strategy.requests import Requests
from unisono.strategy.unit import Unit
from unisono.strategy.values import read_later


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
        loss_scale: What losses are multiplied by, or None.
        on_boundary: Called between two steps, on every rank alike: before a step's first micro-batch.

    Attributes:
        requests: What this rank is asked from outside.
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
        loss_scale: LossScale | None = None,
        on_boundary: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_boundary = on_boundary
        self.comm, self.device, self.seed, self.timer = comm, device, seed, timer
        self.loss_scale = loss_scale
        self.units: list[Unit] = []
        self.step = self.epoch = 0
        self.requests = Requests()
        self.micro: MicroBatch | None = None
        self._on_note = on_note
        self._outcomes = Outcomes(device, int(device.type != "cpu") if lag is None else lag, on_step)
        self._exchange = Exchange(
            comm,
            device,
            self.units,
            self._outcomes,
            seed=seed,
            timer=timer,
            on_note=on_note,
            loss_scale=loss_scale,
        )
        self._models: list[nn.Module] = []
        self._buffers = ModelBuffers(comm, [])
        self._schedule: Schedule | None = None
        self._plan: StepPlan | None = None
        self._watch = Watch([])
        self._num_params, self._all_params = -1, list[torch.Tensor]()
        self._weight: float | None = None
        self._done = True  # whether the present micro-batch needs nothing more
        self._step_in_epoch = 0
        self._stepped_at_once = False  # whether optimizers were updated before the step's end
        self._ended = False  # whether a step has ended in the present micro-batch
        self._named_unprepared = False
        self._count = 0  # micro-batches of the present step that this rank has begun

    def add_unit(self, unit: Unit) -> None:
        """Takes in one more optimizer."""
        self.units.append(unit)

    def add_model(self, model: nn.Module) -> None:
        """Takes in a model whose buffers are to be kept the same."""
        if not any(model is known for known in self._models):
            self._models.append(model)
            self._buffers, self._watch = ModelBuffers(self.comm, self._models), Watch(self._models)
            self._num_params = -1

    def begin(self, epoch: int, micro: MicroBatch, schedule: Schedule) -> None:
        """Starts a micro-batch: gradients cleared, buffers at the step's values, generators seeded.

        Raises:
            Interrupted: a rank was told to stop, and the step has ended.
        """
        if self._joins(micro, schedule):  # a second loader, zipped with the first: its part of the same micro-batch
            self._seed(micro)
            return
        self.settle()
        if self._count == 0:
            self._on_boundary()
        if self.requests.stopping:
            raise Interrupted(f"stopped after step {self.step}")
        if self._count and (epoch, micro.step, micro.index) != self._expected():
            self._on_note(f"the loop was left inside step {self.step}: its gradients are dropped")
            self._count = 0
            self._buffers.restore()
        if self._count == 0:
            self._begin_step(micro, schedule)
        else:
            self._buffers.restore(lend=any(unit.strategy.in_threads for unit in self.units))
        self.micro, self.epoch, self._done, self._weight, self._ended = micro, epoch, False, None, False
        self._count += 1
        self._clear()
        for unit in self.units:
            unit.strategy.begin_micro_batch()
        if self._watches(schedule):
            self._watch.look()
        self._outcomes.values.begin_micro_batch()
        if self._plan is not None and len(self.units) == 1:  # so nobody else's backward can reach the gradients
            self.units[0].strategy.expect_backward(self._plan, micro.leaf, self._scale)
        self._seed(micro)

    def _watches(self, schedule: Schedule) -> bool:
        """Whether weights must stay until the update; where they are sharded, writing to them is an error anyway."""
        return schedule.full_num_micro > 1 and not self.shards_weights

    @property
    def shards_weights(self) -> bool:
        """Whether a forward is collective."""
        return any(unit.strategy.shards_weights for unit in self.units) and self.comm.world_size > 1

    def _expected(self) -> tuple[int, int, int]:
        """What follows the present micro-batch of this rank: the next of its block, or a shadow."""
        assert self._plan is not None
        block = self._plan.blocks[self.comm.rank]
        return self.epoch, self._step_in_epoch, block[self._count] if self._count < len(block) else 0

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
        self._step_in_epoch = micro.step
        self._plan, self._schedule = StepPlan(micro.num_micro, blocks), schedule
        self._outcomes.begin_step()
        self._buffers.begin_step()
        self._stepped_at_once = False
        self._exchange.begin_step()
        self._clear()
        for unit in self.units:
            unit.scales, unit.rates = [], unit.rates_now()
            unit.strategy.begin_step(self._plan)

    def _params(self) -> list[torch.Tensor]:
        return [p for unit in self.units for group in unit.strategy.optimizer.param_groups for p in group["params"]]

    def _clear(self) -> None:
        """Also of what no optimizer has yet: it may be added in mid-step, and not with gradients of many batches."""
        params = self._params()
        if len(params) != self._num_params:
            self._num_params, self._all_params = len(params), list(dict.fromkeys((*params, *self._watch.params)))
        for param in self._all_params:
            param.grad = None

    @property
    def weight(self) -> float:
        """Of the present micro-batch: its number of samples, unless the user gave another."""
        assert self.micro is not None
        return float(self.micro.num_samples) if self._weight is None else self._weight

    def set_weight(self, weight: float) -> None:
        """Weighs the present micro-batch, until the next `optimizer.step()`."""
        if not (weight >= 0 and math.isfinite(weight)):
            raise InputError(f"the weight of {self.where()} is {weight!r}: it must be a finite number, 0 or more")
        self._weight = weight

    def log(self, values: dict[str, Any]) -> None:
        """Notes values of the present micro-batch.

        Raises:
            InputError: its optimizer has been stepped: a step's values leave with its last update.
        """
        if self.micro is not None and len(self.units) == 1 and (self._done or self.stepped_here):
            raise InputError(f"run.log({', '.join(values)}=...) after optimizer.step(): call it before")
        if self.micro is not None and not self._done:
            self._outcomes.values.log(values)

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
        check_stepped(unit, self._count - 1, self.step, self.comm.rank)
        if self._count > 1 and unit.rates != unit.rates_now()[: len(unit.rates)]:
            raise InputError(
                f"a learning rate changed inside of step {self.step}: its micro-batches are one update. Pass the "
                "scheduler to prepare(schedule=...), or step it `if run.step_done`"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._watches(schedule) and not self.stepped_here:
            self._watch.check(self.where())
        self.timer.enter("reduce")
        if self._plan is not None and not unit.scales:
            unit.strategy.adopt_newcomers(self._plan)
        scale, self._weight = self._scale(), None
        unit.scales.append(scale)
        if self._plan is not None:
            unit.strategy.add_micro_batch(self._plan, micro.leaf, scale)
            if unit.strategy.in_threads and micro.is_last:
                self.timer.enter("backward")
                unit.strategy.end_backward(self._plan)
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
                    check_stepped(unit, self._count, self.step, self.comm.rank)
                if len(unit.scales) < self._count and self._plan is not None:
                    unit.strategy.skip_micro_batch(self._plan)
            if micro.is_last:
                if not any(unit.scales for unit in self.units):
                    check_taken(self._params(), f"step {self.step}")
                at_once = self._schedule is not None and self._schedule.full_num_micro == 1
                self._finish([] if at_once else [unit for unit in self.units if unit.scales], last=True)
            elif not micro.shadow:
                self._buffers.end_micro_batch(micro.index, micro.num_micro)
        finally:
            self.micro, self._done = None, True

    def settle_before_reading(self) -> None:
        """Updates that wait for the end of the micro-batch are due before anyone looks at the weights."""
        if self.micro is not None and self.stepped_here:
            self.settle()

    def step_done(self) -> bool:
        """Whether a step has ended in the present micro-batch.

        With several optimizers it ends when the loader goes on; or here, if all have been stepped.
        """
        micro, waits = self.micro, len(self.units) > 1 and not self._done
        if micro is not None and waits and micro.is_last and all(len(u.scales) == self._count for u in self.units):
            self.settle()
        return self._ended

    def end_epoch(self, schedule: Schedule) -> None:
        """Ends the present micro-batch, if the loader that has come to its end is the one that counts the steps."""
        if schedule is self._schedule:
            self.settle()

    def backward(self, loss: torch.Tensor) -> None:
        """Brings a checked loss's gradients into the parameters, under some strategies later."""
        if len(self.units) == 1:
            self.units[0].strategy.backward(loss, self.loss_scale)
        else:
            backward(loss, self.loss_scale)

    def close(self) -> None:
        """Ends the strategies' threads."""
        for unit in self.units:
            unit.strategy.close()

    def abandon(self) -> None:
        """Forgets the present micro-batch: the run has failed, and nobody may be waited for."""
        self.micro, self._done = None, True

    def _finish(self, units: Sequence[Unit], *, last: bool) -> None:
        """Collective: reduces and updates `units`; `last` also ends the step."""
        micro, plan, schedule, buffers = self.micro, self._plan, self._schedule, self._buffers
        assert micro is not None and plan is not None and schedule is not None
        self.timer.enter("reduce")
        if last and not micro.shadow:
            buffers.end_micro_batch(micro.index, micro.num_micro)
        if last:
            self._outcomes.values.start_copy()
        max_block = -(-schedule.full_num_micro // self.comm.world_size)
        ending = Ending(self.step, plan, buffers, max_block, self.requests, last)
        ranks = self._exchange.finish(units, ending)
        if last:
            self._end_step(ranks)

    def _end_step(self, ranks: Sequence[RankStep]) -> None:
        assert self._plan is not None and self._schedule is not None and self.micro is not None
        self._count, self._done = 0, True
        self.requests.hear(ranks)
        if not any(rank.units for rank in ranks) and not self._stepped_at_once:
            return  # nobody stepped anything: batches were only looked at, and that is no step
        self.step += 1
        self._ended = True
        if not self._named_unprepared:
            self._named_unprepared = True
            if sentence := unprepared(self._models, self._params()):
                self._on_note(sentence)
        if is_due(self.step):
            check_alike(self.comm, self._models, self.step)
        step, epoch, times, size = self.step, self.epoch, self.timer.take(), self._schedule.step_size(self.micro.step)
        norm = None if self._exchange.norm is None else read_later(self._exchange.norm)
        lr, scaling, own = self._exchange.lr, {}, loads(ranks)
        if self.loss_scale is not None:
            scaling["loss_scale"] = self.loss_scale.value
            self.loss_scale.end_step(self._exchange.finite)

        def outcome(values: dict[str, float]) -> StepOutcome:
            grad_norm = None if norm is None else lambda: float(norm())
            return StepOutcome(step, epoch, size, grad_norm, lr, {**values, **scaling}, times, own)

        self._outcomes.end_step([len(block) for block in self._plan.blocks], ranks, outcome)

    @property
    def between_steps(self) -> bool:
        """Whether no step has been begun."""
        return self._count == 0

    def restore(self, step: int, epoch: int) -> None:
        """Goes on after a step of an earlier run: its random numbers are those that would have come next."""
        self.step, self.epoch, self.micro, self._done, self._count = step, epoch, None, True, 0
        if step:
            self._exchange.seed_after(step - 1)

    def flush(self) -> None:
        """Collective: tells of steps whose values still wait, and compares the weights of all ranks."""
        self._outcomes.flush(self.comm, self.step)
        check_alike(self.comm, self._models, self.step)
