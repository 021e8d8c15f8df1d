"""Grid: the same recipe on every number of processes and under every strategy, compared with one process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file

from unisono.numerics.ulps import max_ulps
from unisono.verify.compare import Difference, cause, first_difference
from unisono.verify.trace import WEIGHTS, Trace, read_traces

PLAIN = "plain"
# Killed in the middle, all ranks at once, and gone on with by others under another strategy.
KILLED = "killed"
# Of a loss, relative: float32 sums in another order, over some tens of steps. A wrong weight or sample shows above it.
PLAIN_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Cell:
    """One run of the grid.

    Attributes:
        strategy: Its name, `PLAIN` or `KILLED`.
        nproc: Processes.
    """

    strategy: str
    nproc: int


@dataclass(frozen=True)
class Finding:
    """What became of a cell.

    Attributes:
        cell: Which.
        difference: From the reference, None if there is none.
        cause: What probably made it differ.
        skipped: Why it was not run, or None.
        failed: The error that ended it, or None.
        max_loss_error: For `PLAIN`: the largest relative distance of a loss.
    """

    cell: Cell
    difference: Difference | None = None
    cause: str | None = None
    skipped: str | None = None
    failed: str | None = None
    max_loss_error: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether the cell is the same as the reference (a plain loop: the same within `PLAIN_TOLERANCE`)."""
        if self.failed is not None:
            return False
        if self.max_loss_error is not None:
            return self.max_loss_error <= PLAIN_TOLERANCE
        return self.difference is None


RunCell = Callable[[Cell, Path, int | None], None]


class Grid:
    """See the module's docstring.

    Args:
        run_cell: Runs a cell and leaves its traces in a folder; the weights after a given step too. It raises what
            ends the cell.
        num_micro: Micro-batches of a step: the most processes.
    """

    def __init__(self, run_cell: RunCell, num_micro: int) -> None:
        self._run_cell, self._num_micro = run_cell, num_micro
        self.reference = Cell("ddp", 1)
        self._repeats: bool | None = None
        self._parted: set[str] = set()

    def findings(self, cells: Sequence[Cell]) -> Iterator[Finding]:
        """Runs the reference, then yields what each other cell comes to.

        Raises:
            Exception: what ended the reference; there is nothing to compare with.
        """
        trace = self._trace(self.reference)
        self.num_steps, self.digest = len(trace.steps), trace.digest
        for cell in cells:
            if cell == self.reference:
                yield Finding(cell)
            elif cell.nproc > self._num_micro:
                yield Finding(cell, skipped=f"a step has {self._num_micro} micro-batches")
            else:
                yield self._judge(cell, trace)

    def _trace(self, cell: Cell) -> Trace:
        with tempfile.TemporaryDirectory() as folder:
            self._run_cell(cell, Path(folder), None)
            return read_traces(Path(folder))

    def _judge(self, cell: Cell, reference: Trace) -> Finding:
        try:
            trace = self._trace(cell)
        except Exception as error:
            return Finding(cell, failed=str(error))
        difference = first_difference(reference, trace)
        if cell.strategy == PLAIN:
            return Finding(cell, difference, max_loss_error=_loss_error(reference, trace))
        if difference is None:
            return Finding(cell)
        if difference.tensor is not None:
            difference = replace(difference, max_ulps=self._measure(cell, difference.step))
        self._parted.add(cell.strategy)
        if self._repeats is None:
            self._repeats = first_difference(reference, self._trace(self.reference)) is None
        same_strategy = self.reference.strategy in self._parted
        return Finding(cell, difference, cause(difference, repeats=self._repeats, same_strategy=same_strategy))

    def _measure(self, cell: Cell, step: int) -> int | None:
        """Runs both once more, to look at the weights after a step."""
        states = []
        for one in (self.reference, cell):
            with tempfile.TemporaryDirectory() as folder:
                self._run_cell(one, Path(folder), step)
                file = Path(folder) / WEIGHTS
                states.append(load_file(file) if file.exists() else {})
        return max_ulps(*states)


def _loss_error(reference: Trace, other: Trace) -> float:
    """The largest relative distance of two losses of the same micro-batch."""
    largest = 0.0
    for key, (_, here) in reference.micros.items():
        if key not in other.micros:
            return float("inf")
        one, two = float.fromhex(here), float.fromhex(other.micros[key][1])
        largest = max(largest, abs(one - two) / max(abs(one), abs(two), 1e-12))
    return largest


def as_json(grid: Grid, findings: Sequence[Finding]) -> str:
    """Returns everything that was found."""
    rows = []
    for finding in findings:
        row = {"strategy": finding.cell.strategy, "nproc": finding.cell.nproc, "agrees": finding.agrees}
        if finding.skipped is not None:
            row = {**row, "agrees": None, "skipped": finding.skipped}
        if finding.failed is not None:
            row["failed"] = finding.failed
        if finding.max_loss_error is not None:
            row["max_loss_error"] = finding.max_loss_error
        if finding.difference is not None:
            row |= {**finding.difference.__dict__, "cause": finding.cause}
        rows.append(row)
    same = all(finding.agrees for finding in findings if finding.skipped is None)
    return json.dumps({"steps": grid.num_steps, "weights_digest": grid.digest, "agrees": same, "cells": rows})
