"""`unisono verify` finds what was planted, says where it shows first, and names the cause."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.worlds import run_world
from unisono.execution import Execution
from unisono.numerics.ulps import max_ulps
from unisono.verify.grid import PLAIN, Cell, Finding, Grid, as_json

RECIPE = """
import os, torch, unisono
from torch import nn

FAULT = {fault!r}
RANK = int(os.environ.get("RANK", 0))

class Counting(torch.utils.data.Dataset):
    calls = 0
    def __len__(self):
        return 40
    def __getitem__(self, index):
        Counting.calls += 1
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x + (Counting.calls if FAULT == "counts" else 0), int(index) % 3

def loss(model, batch):
    if FAULT == "seeded by rank":
        torch.manual_seed(RANK)
    if FAULT == "clock":
        torch.manual_seed(os.getpid())
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def recipe():
    return unisono.Recipe(
        model=lambda: nn.Sequential(nn.Linear(6, 31), nn.BatchNorm1d(31), nn.Dropout(0.5), nn.Linear(31, 3)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        train=Counting(),
        global_batch=16,
        micro_batch=4,
    )
"""


def one_rank(source: str, cell: dict[str, Any], folder: str, save_at: int | None, fault: str) -> None:
    from unisono.cli.worker import RecipeJob, trace_recipe
    from unisono.launch.environment import detect

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        plant(fault)
    job = RecipeJob(source=source, steps=4, how=Execution(strategy=cell["strategy"]))
    trace_recipe({"job": job.said(), "folder": folder, "save_at": save_at}, detect())


def plant(fault: str) -> None:
    """Breaks the engine itself, on several processes only."""
    if fault == "drops a sample":
        import unisono.data.loader as loader

        order = loader.permutation

        def dropping(seed: int, epoch: int, size: int) -> Any:
            right = order(seed, epoch, size)
            return lambda positions: np.where(right(positions) == 7, 8, right(positions))

        loader.permutation = dropping  # type: ignore[assignment]
    if fault == "adds in another order":
        from unisono.strategy.reduction import Reduction

        def one_by_one(self: Reduction, addends: Any) -> torch.Tensor:
            first, *rest = [part for _, part in sorted(addends, key=lambda addend: addend[0].number)]
            return sum(rest, first.clone())

        Reduction._add_up = one_by_one  # type: ignore[method-assign]


def verify(folder: Path, fault: str, cells: list[Cell]) -> tuple[Grid, dict[Cell, Finding]]:
    source = folder / "planted.py"
    source.write_text(RECIPE.format(fault=fault))

    def run_cell(cell: Cell, into: Path, save_at: int | None) -> None:
        run_world(cell.nproc, one_rank, str(source), asdict(cell), str(into), save_at, fault)

    grid = Grid(run_cell, 4)
    return grid, {finding.cell: finding for finding in grid.findings(cells)}


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    cells = [Cell("ddp", 1), Cell("ddp", 3), Cell("zero1", 2), Cell("zero2", 3), Cell("ddp", 5), Cell(PLAIN, 1)]
    grid, findings = verify(tmp_path, "", cells)
    assert [findings[cell].difference for cell in cells] == [None] * 6
    assert findings[Cell("ddp", 5)].skipped == "a step has 4 micro-batches"
    assert findings[Cell(PLAIN, 1)].max_loss_error == 0.0
    found = json.loads(as_json(grid, list(findings.values())))
    assert found["agrees"] is True
    assert found["steps"] == 4
    assert found["weights_digest"].startswith("sha256:")
    assert [cell["agrees"] for cell in found["cells"]] == [True, True, True, True, None, True]


@pytest.mark.parametrize(
    ("fault", "world_size", "kind", "words"),
    [
        ("drops a sample", 2, "data", "the sampling was changed"),
        ("adds in another order", 3, "weights", "added in another order"),
        ("seeded by rank", 2, "loss", "by rank"),
        ("counts", 2, "data", "count their calls"),
        ("clock", 2, "loss", "not even one process gives the same twice"),
    ],
)
def test_what_was_planted_is_found(tmp_path: Path, fault: str, world_size: int, kind: str, words: str) -> None:
    grid, findings = verify(tmp_path, fault, [Cell("ddp", world_size)])
    (finding,) = findings.values()
    assert not finding.agrees
    assert finding.difference is not None
    assert finding.difference.kind == kind
    assert finding.difference.tensor is not None
    assert finding.difference.max_ulps is not None
    assert finding.difference.max_ulps > 0
    assert finding.cause is not None
    assert words in finding.cause
    assert json.loads(as_json(grid, [finding]))["agrees"] is False


def test_a_plain_loop_that_trains_otherwise_is_noticed(tmp_path: Path) -> None:
    _, findings = verify(tmp_path, "clock", [Cell(PLAIN, 1)])
    (finding,) = findings.values()
    assert finding.max_loss_error is not None
    assert finding.max_loss_error > 1e-3
    assert not finding.agrees


def test_a_cell_that_fails_is_a_finding(tmp_path: Path) -> None:
    def run_cell(cell: Cell, into: Path, save_at: int | None) -> None:
        if cell.nproc > 1:
            raise RuntimeError("rank 1 failed: out of luck")
        source = tmp_path / "planted.py"
        source.write_text(RECIPE.format(fault=""))
        run_world(1, one_rank, str(source), asdict(cell), str(into), save_at, "")

    (finding,) = Grid(run_cell, 4).findings([Cell("ddp", 2)])
    assert finding.failed == "rank 1 failed: out of luck"
    assert not finding.agrees


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_distances_are_counted_in_units_of_the_last_place(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, -1.0, 0.0], dtype=dtype)
    up = torch.nextafter(one.float() if dtype.itemsize < 4 else one, torch.tensor(9.0, dtype=torch.float32).to(one))
    if dtype.itemsize == 4:
        assert max_ulps({"w": one}, {"w": up}) == 1
    smallest = torch.finfo(dtype).tiny
    assert max_ulps({"w": torch.tensor([0.0], dtype=dtype)}, {"w": torch.tensor([-0.0], dtype=dtype)}) == 0
    across = {"w": torch.tensor([smallest], dtype=dtype)}, {"w": torch.tensor([-smallest], dtype=dtype)}
    mantissa = {torch.float32: 23, torch.float64: 52, torch.bfloat16: 7, torch.float16: 10}[dtype]
    assert max_ulps(*across) == 2 * 2**mantissa
    assert max_ulps({"n": torch.tensor([3])}, {"n": torch.tensor([8])}) == 5
