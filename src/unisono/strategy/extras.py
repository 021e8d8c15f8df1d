"""What ranks tell each other about a step beside its gradients, in one small message of fixed size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from unisono.comm.api import Collectives, Pending
from unisono.errors import CommError
from unisono.strategy.reduction import EXTRAS

MAX_VALUES = 8
_HEADER = np.dtype([("step", "<i8"), ("names", "<i8"), ("units", "<i8"), ("flags", "<i8")])
_STOP, _QUIET_CHANGED, _RESEND = 1, 2, 4


@dataclass
class RankStep:
    """One rank's part of a step.

    Attributes:
        step: The optimizer step, counted over the run; a rank in another one has lost the thread.
        names: Hash of the names of `values`; must agree.
        units: Bit k says that optimizer k was stepped.
        stop: The rank was told to stop (SIGTERM, say): all stop after this step.
        resend: A gradient was sent before it was final.
        quiet_changed: Micro-batch 0 changed a buffer that is not known to change.
        scales: For each optimizer, a scale (weight / micro-batch size) for each micro-batch of the rank's block.
        values: Logged values of each micro-batch, in name order, NaN where there is none.
        present: For each optimizer, which of its parameters got a gradient.
    """

    step: int
    names: int = 0
    units: int = 0
    stop: bool = False
    quiet_changed: bool = False
    resend: bool = False
    scales: list[list[float]] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    present: list[list[bool]] = field(default_factory=list)


class ExtrasExchange:
    """Sends a rank's `RankStep` to all others and reads theirs.

    Args:
        comm: The ranks.
        max_block: Most micro-batches that a rank has in a step.
        unit_sizes: Number of parameters of each optimizer.
    """

    def __init__(self, comm: Collectives, max_block: int, unit_sizes: Sequence[int]) -> None:
        self.comm = comm
        num_units = max(1, len(unit_sizes))
        layout: list[tuple[Any, ...]] = [("header", _HEADER)]
        layout += [("scales", "<f8", (num_units, max_block)), ("values", "<f8", (max_block, MAX_VALUES))]
        layout += [(f"present{k}", "u1", (-(-size // 8),)) for k, size in enumerate(unit_sizes) if size]
        self._dtype = np.dtype(layout)
        self._unit_sizes = list(unit_sizes)
        self._memory = torch.zeros((comm.world_size, self._dtype.itemsize), dtype=torch.uint8)
        self._rows = self._memory.numpy().view(self._dtype).reshape(-1)

    def launch(self, mine: RankStep) -> Pending:
        """Starts the exchange."""
        row = self._rows[self.comm.rank : self.comm.rank + 1]
        flags = _STOP * mine.stop | _QUIET_CHANGED * mine.quiet_changed | _RESEND * mine.resend
        row["header"] = (mine.step, mine.names, mine.units, flags)
        for k, scales in enumerate(mine.scales):
            row["scales"][0, k, : len(scales)] = scales
        row["values"] = math.nan
        for number, values in enumerate(mine.values):
            row["values"][0, number, : len(values)] = values
        for k, bits in enumerate(mine.present):
            if bits:
                row[f"present{k}"][0] = np.packbits(np.asarray(bits, dtype=np.uint8))
        return self.comm.all_gather([[self._memory[rank]] for rank in range(self.comm.world_size)], channel=EXTRAS)

    def read(self, pending: Pending, blocks: Sequence[range]) -> list[RankStep]:
        """Waits for all ranks.

        Raises:
            CommError: a rank is in another step.
        """
        pending.wait()
        found = [self._decode(self._rows[rank], len(block)) for rank, block in enumerate(blocks)]
        mine = found[self.comm.rank]
        for rank, other in enumerate(found):
            if other.step != mine.step:
                raise CommError(
                    f"rank {rank} is in step {other.step} while rank {self.comm.rank} is in step {mine.step}: the "
                    "ranks' loops differ; every rank must step once for each of its micro-batches"
                )
        return found

    def _decode(self, row: np.void, count: int) -> RankStep:
        step, names, units, flags = row["header"].tolist()
        sizes = enumerate(self._unit_sizes)
        present = [np.unpackbits(row[f"present{k}"], count=n).astype(bool).tolist() if n else [] for k, n in sizes]
        scales, values = row["scales"][:, :count].tolist(), row["values"].tolist()
        return RankStep(
            step=step,
            names=names,
            units=units,
            stop=bool(flags & _STOP),
            quiet_changed=bool(flags & _QUIET_CHANGED),
            resend=bool(flags & _RESEND),
            scales=scales,
            values=values,
            present=present,
        )
