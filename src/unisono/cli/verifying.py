"""What `unisono verify` does: run the grid, show a table."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.cli.start import shared
from unisono.cli.worker import RecipeJob
from unisono.execution import Execution
from unisono.launch.elastic import Job, RanksFailed, launch
from unisono.strategy.catalog import STRATEGIES, strategy_name
from unisono.strategy.threaded import ThreadedStrategy
from unisono.verify.grid import KILLED, PLAIN, PLAIN_TOLERANCE, Cell, Finding, Grid
from unisono.verify.grid import as_json as grid_as_json


def start(job: RecipeJob, worlds: Sequence[int], strategies: str, *, as_json: bool) -> int:
    """Verifies a recipe; returns the exit code: 0 if all agree, 1 if not.

    Raises:
        InputError: the recipe or a strategy cannot work.
        RanksFailed: not even the reference run came to its end.
    """
    names = list(STRATEGIES) if strategies == "all" else [strategy_name(name) for name in strategies.split(",")]
    recipe = job.load().recipe
    command = [sys.executable, "-m", "unisono.cli.worker", "trace"]

    def trace(how: Execution, nproc: int, folder: Path, **more: Any) -> None:
        if how.strategy != PLAIN:
            how, nproc = shared(how, nproc)
        said = {"job": replace(job, how=how).said(), "folder": str(folder), **more}
        launch(Job(command=[*command, json.dumps(said)], nproc=nproc, threads=recipe.threads))

    def run_cell(cell: Cell, folder: Path, save_at: int | None) -> None:
        if cell.strategy != KILLED:
            trace(replace(job.how, strategy=cell.strategy), cell.nproc, folder, save_at=save_at)
            return
        kill_after = max(1, (job.steps or 1) // 2)
        with contextlib.suppress(RanksFailed):
            trace(
                replace(job.how, strategy=before.strategy),
                before.nproc,
                folder,
                save_at=save_at,
                kill_after=kill_after,
                part="a",
            )
        how = replace(job.how, strategy=after.strategy, resume=str(folder / "run"))
        trace(how, after.nproc, folder, save_at=None, part="b")

    cells = [Cell(name, world) for name in names for world in worlds]
    before, after = _killed_and_after(cells, recipe.full_num_micro)
    cells += [Cell(PLAIN, 1), Cell(KILLED, before.nproc)]
    screen = Console(file=sys.stderr)
    grid, findings = Grid(run_cell, recipe.full_num_micro), []
    with screen.status(f"{job.source}: {len(cells)} runs of {job.steps} steps") as status:
        for finding in grid.findings(cells):
            findings.append(finding)
            status.update(f"{job.source}: {len(findings)} of {len(cells)} runs done")
    agree = all(finding.agrees for finding in findings if finding.skipped is None)
    if as_json:
        print(grid_as_json(grid, findings))
    else:
        _show(job, grid, findings, names, worlds, agree)
    return 0 if agree else 1


def _killed_and_after(cells: Sequence[Cell], num_micro: int) -> tuple[Cell, Cell]:
    """Chooses what is killed, and what goes on from there: as unlike as the grid has them."""
    fit = [cell for cell in cells if cell.nproc <= num_micro and cell.strategy != ThreadedStrategy.name]
    fit = fit or [Cell("ddp", 1)]
    return max(fit, key=lambda cell: cell.nproc), min(reversed(fit), key=lambda cell: cell.nproc)


def _show(
    job: RecipeJob, grid: Grid, findings: list[Finding], names: list[str], worlds: Sequence[int], agree: bool
) -> None:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    by_cell = {finding.cell: finding for finding in findings}
    console.print(f"{job.source}: weights after each of {grid.num_steps} steps, beside ddp on one process")
    table = Table()
    table.add_column("strategy")
    for world in worlds:
        table.add_column(f"{world} process{'es' * (world > 1)}")
    for name in names:
        table.add_row(name, *(_cell(by_cell[Cell(name, world)]) for world in worlds))
    console.print(table)
    plain = by_cell[Cell(PLAIN, 1)]
    console.print(f"plain PyTorch loop: {_plain(plain)}")
    killed = next(finding for finding in findings if finding.cell.strategy == KILLED)
    console.print(Text("killed in the middle, and gone on with by others: ") + _cell(killed))
    for text in dict.fromkeys(finding.cause or finding.failed for finding in findings if not finding.agrees):
        if text:
            console.print(f"likely cause: {text}")
    for text in dict.fromkeys(finding.skipped for finding in findings if finding.skipped):
        console.print(f"not run where there are more processes: {text}")
    console.print("the same on all" if agree else "NOT the same")
    console.print(f"weights {grid.digest}")


def _cell(finding: Finding) -> Text:
    if finding.skipped is not None:
        return Text("-")
    if finding.failed is not None:
        return Text("failed", style="red")
    if finding.difference is None:
        return Text("identical", style="green")
    there = finding.difference
    ulps = "" if there.max_ulps is None else f", {there.max_ulps} ulp{'s' * (there.max_ulps != 1)}"
    return Text(f"step {there.step}: {there.tensor or there.kind}{ulps}", style="red")


def _plain(finding: Finding) -> str:
    if finding.failed is not None:
        return f"failed: {finding.failed}"
    if finding.difference is None:
        return "identical"
    error = f"losses within {finding.max_loss_error:.1g}, relative"
    if finding.agrees:
        return f"{error} (bits differ from step {finding.difference.step} on: {finding.difference.kind})"
    return f"{error}, more than {PLAIN_TOLERANCE:g}: first in step {finding.difference.step}"
