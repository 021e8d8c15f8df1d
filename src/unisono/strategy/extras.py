"""What ranks tell each other about a step beside its gradients, in one small message of fixed size."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from unisono.comm.api import Collectives, Pending
from unisono.errors import CommError
from unisono.strategy.reduction import EXTRAS

MAX_VALUES = 8
_STOP, _QUIET_CHANGED, _RESEND, _BEGAN, _SAVE = 1, 2, 4, 8, 16


@dataclass
class RankStep:
    """One rank's part of a step.

    Attributes:
        step: The optimizer step, counted over the run; a rank in another one has lost the thread.
        names: Hash of the names of `values`; must agree.
        units: Bit k says that optimizer k was stepped.
        stop: The rank was told to stop (SIGTERM, say): all stop after this step.
        save: The rank wants the state saved (by the clock, say): all do, before the next step.
        resend: A gradient was sent before it was final.
        began: Gradients were sent of an optimizer that was then not stepped.
        outside: Checksum of buffers that were changed between steps; must agree.
        quiet_changed: Micro-batch 0 changed a buffer that is not known to change.
        scales: For each optimizer, a scale (weight / micro-batch size) for each micro-batch of the rank's block.
        data_s: Seconds that this rank has waited for its data in the step.
        compute_s: Seconds of its forwards and backwards.
        values: Logged values of each micro-batch, in name order, NaN where there is none.
        present: For each optimizer, which of its parameters got a gradient.
    """

    step: int
    names: int = 0
    units: int = 0
    stop: bool = False
    save: bool = False
    quiet_changed: bool = False
    resend: bool = False
    began: bool = False
    outside: int = 0
    scales: list[list[float]] = field(default_factory=list)
    data_s: float = 0.0
    compute_s: float = 0.0
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
        self._max_block, self._unit_sizes = max_block, list(unit_sizes)
        self.sizes = (max_block, self._unit_sizes)
        self._num_scales = len(self._unit_sizes) * max_block
        # Packed by one call each way: numpy's records took 85 us a step, which a small model would notice.
        numbers = self._num_scales + max_block * MAX_VALUES
        self._format = struct.Struct(f"<5q2d{numbers}d{sum(self._unit_sizes)}?")
        self._memory = torch.zeros((comm.world_size, self._format.size), dtype=torch.uint8)
        self._rows = [row.numpy() for row in self._memory]

    def launch(self, mine: RankStep) -> Pending:
        """Starts the exchange."""
        flags = _STOP * mine.stop | _QUIET_CHANGED * mine.quiet_changed | _RESEND * mine.resend | _BEGAN * mine.began
        flags |= _SAVE * mine.save
        scales = [scale for own in mine.scales for scale in _padded(own, self._max_block, 0.0)]
        rows = [value for row in mine.values for value in _padded(row, MAX_VALUES, math.nan)]
        values = _padded(rows, self._max_block * MAX_VALUES, math.nan)
        present = [there for own in mine.present for there in own]
        header = (mine.step, mine.names, mine.units, flags, mine.outside, mine.data_s, mine.compute_s)
        self._format.pack_into(self._rows[self.comm.rank], 0, *header, *scales, *values, *present)
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

    def _decode(self, memory: Any, count: int) -> RankStep:
        step, names, units, flags, outside, data_s, compute_s, *rest = self._format.unpack_from(memory)
        values = self._num_scales
        present = values + self._max_block * MAX_VALUES
        starts = list(accumulate(self._unit_sizes, initial=present))
        return RankStep(
            step=step,
            names=names,
            units=units,
            stop=bool(flags & _STOP),
            save=bool(flags & _SAVE),
            quiet_changed=bool(flags & _QUIET_CHANGED),
            resend=bool(flags & _RESEND),
            began=bool(flags & _BEGAN),
            outside=outside,
            data_s=data_s,
            compute_s=compute_s,
            scales=[rest[start : start + count] for start in range(0, values, self._max_block)],
            values=[rest[start : start + MAX_VALUES] for start in range(values, present, MAX_VALUES)],
            present=[rest[start:stop] for start, stop in pairwise(starts)],
        )


def loads(ranks: Sequence[RankStep]) -> list[tuple[float, float]]:
    """Returns seconds a micro-batch of each rank: waited for data, and computed."""
    counts = [max((len(own) for own in rank.scales), default=0) or 1 for rank in ranks]
    return [(rank.data_s / count, rank.compute_s / count) for rank, count in zip(ranks, counts, strict=True)]


def _padded(values: list[float], length: int, filling: float) -> list[float]:
    return values + [filling] * (length - len(values))
