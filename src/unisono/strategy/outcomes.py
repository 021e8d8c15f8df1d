"""Outcomes: what a finished step has to tell, once the values that were logged in it are known everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unisono.comm.api import Collectives
from unisono.errors import InputError
from unisono.observe.events import StepOutcome
from unisono.strategy.extras import RankStep
from unisono.strategy.values import StepValues, average


@dataclass
class _Waiting:
    """A finished step whose values have not been exchanged yet."""

    values: StepValues
    counts: list[int]
    scales: list[list[list[float]]]
    outcome: Callable[[dict[str, float]], StepOutcome]


class Outcomes:
    """Logged values travel with the exchange of their own step, or of the next one.

    Args:
        device: Where values are computed.
        lag: How many steps later they are read: 0 on a CPU, 1 where reading would stall the device.
        on_step: Called with every step's outcome, on every rank.

    Attributes:
        values: Of the present step.
    """

    def __init__(self, device: torch.device, lag: int, on_step: Callable[[StepOutcome], None]) -> None:
        self.lag = lag
        self._device, self._on_step = device, on_step
        self.values = StepValues(device)
        self._waiting: list[_Waiting] = []

    def begin_step(self) -> None:
        """Starts to collect a step's values."""
        self.values = StepValues(self._device)

    def tell(self) -> tuple[int, list[list[float]]]:
        """Returns the hash of the names, and the rows, that this rank tells with the present step."""
        if not self.lag:
            return self.values.names_hash, self.values.read()
        return self.tell_oldest() if self._waiting else (0, [])

    def tell_oldest(self) -> tuple[int, list[list[float]]]:
        """Returns the same of the oldest step that waits."""
        values = self._waiting[0].values
        return values.names_hash, values.read()

    def end_step(
        self, counts: list[int], ranks: Sequence[RankStep], outcome: Callable[[dict[str, float]], StepOutcome]
    ) -> None:
        """Notes a finished step, and passes on the one whose values `ranks` have told.

        Args:
            counts: Micro-batches of each rank.
            ranks: What all ranks told.
            outcome: Makes the record, given the means of the values.
        """
        self._waiting.append(_Waiting(self.values, counts, [rank.scales for rank in ranks], outcome))
        if len(self._waiting) > self.lag:
            self.pass_on(ranks)

    def flush(self, comm: Collectives, step: int) -> None:
        """Collective: passes on all that wait."""
        while self._waiting:
            names, values = self.tell_oldest()
            self.pass_on(comm.gather_objects(RankStep(step, names, values=values)))

    def pass_on(self, ranks: Sequence[RankStep]) -> None:
        """Averages the values of the oldest waiting step, told by `ranks`.

        Raises:
            InputError: the ranks logged values of different names.
        """
        waiting = self._waiting.pop(0)
        names = waiting.values.names
        if len({rank.names for rank in ranks}) > 1:
            raise InputError(f"ranks log values of different names (here: {names}): log the same on every rank")
        rows = [
            RankStep(rank.step, scales=scales, values=rank.values)
            for rank, scales in zip(ranks, waiting.scales, strict=True)
        ]
        self._on_step(waiting.outcome(average(names, rows, waiting.counts)))
