"""Unit: one prepared optimizer and what goes with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from unisono.strategy.base import Strategy


@dataclass
class Unit:
    """One prepared optimizer.

    Attributes:
        strategy: What reduces its gradients.
        update: The optimizer's own `step`.
        schedules: `step` of LR schedulers that go with it.
        schedulers: These themselves.
        clip_norm: Largest gradient norm, or None.
        scales: Of this rank's micro-batches of the present step, as far as it was stepped.
        rates: Learning rates at the step's begin.
        named_unused: Whether parameters without a gradient have been named.
    """

    strategy: Strategy
    update: Callable[[], Any]
    schedules: list[Callable[[], None]] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    clip_norm: float | None = None
    scales: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    named_unused: bool = False

    def rates_now(self) -> list[float]:
        """Returns the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.strategy.optimizer.param_groups]
