"""Exchange: what all ranks do together when optimizers are due: gradients, buffers and the rest, then the updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unisono.comm.api import Collectives
from unisono.errors import CommError, InputError
from unisono.numerics.seeds import derive_seed, seed_all
from unisono.observe.timer import PhaseTimer
from unisono.strategy.base import StepPlan
from unisono.strategy.buffers import ModelBuffers
from unisono.strategy.extras import ExtrasExchange, RankStep
from unisono.strategy.loss_scale import LossScale
from unisono.strategy.outcomes import Outcomes
from unisono.strategy.pieces import may_draw
from unisono.strategy.requests import Requests
from unisono.strategy.unit import Unit


@dataclass(frozen=True)
class Ending:
    """What is to be ended.

    Attributes:
        step: Counted over the run.
        plan: Of the step.
        buffers: Of all models.
        max_block: Most micro-batches that a rank has in any step.
        requests: What this rank is asked from outside.
        last: Whether the step ends too, or only one optimizer's part of it.
    """

    step: int
    plan: StepPlan
    buffers: ModelBuffers
    max_block: int
    requests: Requests
    last: bool


class Exchange:
    """See the module's docstring.

    Args:
        comm: The ranks.
        device: Where models run.
        units: All optimizers of the run; the list grows as they are prepared.
        outcomes: Where logged values are.
        seed: Of what is drawn in an update, and after it.
        timer: Told of each phase.
        on_note: Called with a sentence for the user.
        loss_scale: What losses are multiplied by, or None.

    Attributes:
        finite: Whether all gradients of this step were.
        norm: Of the first optimizer's gradient in this step, once it is known.
        lr: Of its first parameter group.
    """

    def __init__(
        self,
        comm: Collectives,
        device: torch.device,
        units: Sequence[Unit],
        outcomes: Outcomes,
        *,
        seed: int,
        timer: PhaseTimer,
        on_note: Callable[[str], None],
        loss_scale: LossScale | None = None,
    ) -> None:
        self._loss_scale, self.finite = loss_scale, True
        self.comm, self._device, self._units, self._outcomes = comm, device, units, outcomes
        self._seed, self._timer, self._on_note = seed, timer, on_note
        self._extras: ExtrasExchange | None = None
        self.norm: torch.Tensor | None = None
        self.lr = math.nan

    def begin_step(self) -> None:
        """Forgets the last step's norm."""
        self.norm, self.lr, self.finite = None, math.nan, True

    def finish(self, units: Sequence[Unit], ending: Ending) -> list[RankStep]:
        """Collective: reduces and updates `units`; returns what all ranks told.

        Raises:
            CommError: the ranks' loops differ.
            InputError: a gradient is missing everywhere or not finite, or buffers were changed unlike.
        """
        plan, buffers = ending.plan, ending.buffers
        extras = self._sized(ending.max_block)
        pending = extras.launch(self._mine(units, ending))
        for unit in units:
            unit.strategy.launch(plan)
        if ending.last:
            buffers.launch(plan)
        ranks = extras.read(pending, plan.blocks)
        self._check(ranks, ending.step)
        if any(rank.began for rank in ranks):
            for unit in self._units:
                unit.strategy.cancel(plan)
        fit = []
        for unit in units:
            if any(rank.resend for rank in ranks):
                unit.strategy.resend(plan)
            fit.append(self._reduce(unit, ranks, ending.step))
        if ending.last:  # before the updates: hooks on these may write to buffers
            buffers.complete(plan, any(rank.quiet_changed for rank in ranks))
        for unit, there in zip(units, fit, strict=True):
            self._update(unit, ranks, ending.step, there)
        return ranks

    def _sized(self, max_block: int) -> ExtrasExchange:
        sizes = [len(unit.strategy.parameter_names()) for unit in self._units]
        if self._extras is None or self._extras.sizes != (max_block, sizes):
            self._extras = ExtrasExchange(self.comm, max_block, sizes)
        return self._extras

    def _mine(self, units: Sequence[Unit], ending: Ending) -> RankStep:
        names, values = self._outcomes.tell() if ending.last or self._outcomes.lag else (0, [])
        stepped = [any(unit is other for other in units) for unit in self._units]
        data_s, compute_s = self._timer.own_work()
        return RankStep(
            step=ending.step,
            names=names,
            units=sum(1 << k for k, there in enumerate(stepped) if there),
            stop=ending.requests.stop,
            save=ending.requests.save,
            quiet_changed=ending.buffers.quiet_changed,
            outside=ending.buffers.outside,
            resend=any(unit.strategy.must_resend for unit in units),
            began=any(unit.strategy.began for unit, there in zip(self._units, stepped, strict=True) if not there),
            data_s=data_s,
            compute_s=compute_s,
            scales=[unit.scales[: len(ending.plan.blocks[self.comm.rank])] for unit in self._units],
            values=values,
            present=[unit.strategy.presence() for unit in self._units],
        )

    def _check(self, ranks: Sequence[RankStep], step: int) -> None:
        mine = ranks[self.comm.rank]
        for rank, other in enumerate(ranks):
            if other.units != mine.units:
                raise CommError(
                    f"in step {step} rank {rank} stepped other optimizers than rank {self.comm.rank}: decide "
                    "by `run.step`, which is the same on every rank"
                )
            if other.outside != mine.outside:
                raise InputError(
                    f"buffers were changed between step {step - 1} and step {step}, on rank {rank} otherwise "
                    f"than on rank {self.comm.rank}: change them alike, and let forwards outside of the loop run in "
                    "eval mode, or in run.evaluate"
                )

    def seed_after(self, step: int) -> None:
        """Seeds all generators as they are after a step, if all optimizers were stepped in it."""
        for unit in self._units:
            self._seed_after(unit, step)

    def _seed_after(self, unit: Unit, step: int) -> None:
        word = "updated" if may_draw(unit.strategy.optimizer) else "update"
        seed_all(derive_seed(self._seed, word, step, self._number(unit)), self._device)

    def _number(self, unit: Unit) -> int:
        return next(k for k, other in enumerate(self._units) if other is unit)

    def _total(self, unit: Unit, ranks: Sequence[RankStep]) -> float:
        number = self._number(unit)
        return math.fsum(scale for rank in ranks for scale in rank.scales[number])

    def _reduce(self, unit: Unit, ranks: Sequence[RankStep], step: int) -> bool:
        """Returns whether there is a gradient to update with."""
        number, total = self._number(unit), self._total(unit, ranks)
        present = [any(bits) for bits in zip(*(rank.present[number] for rank in ranks), strict=True)]
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        norm = unit.strategy.complete((total or 1.0) * scale, present, unit.clip_norm)
        if not unit.named_unused and not (present and all(present)):
            pairs = zip(unit.strategy.parameter_names(), present, strict=True)
            unused = sorted(name for name, there in pairs if not there)
            if total > 0 and not any(present):
                raise InputError(
                    "no parameter of the optimizer got a gradient in its first step: was it made from this model's "
                    "parameters, do they have requires_grad=True, and is loss.backward() called before "
                    "optimizer.step()?"
                )
            self._on_note(f"no gradient in the first step for: {', '.join(unused[:8])}{' ...' * (len(unused) > 8)}")
        unit.named_unused = True
        finite = True if self._outcomes.lag and self._loss_scale is None else math.isfinite(norm.item())
        self.finite = self.finite and finite
        if not finite and self._loss_scale is None:
            raise InputError(
                f"the gradient of step {step} is not finite (norm {norm.item()}); "
                "the weights are as they were before it: lower the learning rate, or clip_norm"
            )
        if number == 0:
            self.norm, self.lr = norm, float(unit.strategy.optimizer.param_groups[0]["lr"])
        return finite and total > 0

    def _update(self, unit: Unit, ranks: Sequence[RankStep], step: int, fit: bool) -> None:
        self._timer.enter("optimizer")
        # What an optimizer draws, and the loop after it, is alike on all ranks, whatever they drew before.
        number = self._number(unit)
        seed_all(derive_seed(self._seed, "update", step, number), self._device)
        if fit:
            unit.strategy.update(unit.update)
            if may_draw(unit.strategy.optimizer):
                self._seed_after(unit, step)
        for schedule in unit.schedules:
            schedule()
        self._timer.enter("reduce")
