"""Requests: what one rank is asked from outside (by a signal, a clock), and all then do after the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.strategy.extras import RankStep


@dataclass
class Requests:
    """See the module's docstring.

    Attributes:
        stop: This rank is asked to stop.
        save: It is asked to have the state saved.
        stopping: All stop, once the last step has ended.
        saving: All save, after the last step.
    """

    stop: bool = False
    save: bool = False
    stopping: bool = False
    saving: bool = False

    def hear(self, ranks: Sequence[RankStep]) -> None:
        """Takes in what all ranks were asked when a step ended."""
        self.stopping = self.stopping or any(rank.stop for rank in ranks)
        self.saving, self.save = any(rank.save for rank in ranks), False
