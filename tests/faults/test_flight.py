"""A hang explains itself: one table, the odd one out first, and the likely cause."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.commands import UNISONO, Done, run, started, steps, wait_until

SCRIPT = """
import os, signal, sys, time
import torch, unisono
from torch import nn

fault, transport = sys.argv[1:]

def hang_here():
    time.sleep(1000)

with unisono.init(timeout_s=4, transport=transport) as run:
    data = torch.utils.data.TensorDataset(torch.randn(960, 4), torch.randint(0, 3, (960,)))
    model = nn.Linear(4, 3)
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, global_batch=12, micro_batch=4
    )
    for inputs, targets in loader:
        if run.rank == 1 and run.step == 5:
            if fault == "hang":
                hang_here()
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raise":
                raise KeyError("no such thing")
            if fault == "barrier":
                run.barrier("nobody else's")
        if fault == "slow":
            time.sleep(0.05)
        run.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
"""


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SCRIPT)
    return tmp_path


def command(nproc: int, fault: str, transport: str = "auto") -> list[str]:
    return [*UNISONO, "run", "--nproc", str(nproc), "--run-dir", "it", "mine.py", fault, transport]


def rows(done: Done) -> list[str]:
    """Lines of the table that begin a rank's part."""
    return [line for line in done.err.splitlines() if re.match(r"rank \d+  .* for .* s; step", line)]


@pytest.mark.parametrize(
    ("nproc", "transport"),
    [
        (2, "auto"),
        (3, "gloo"),
        *[pytest.param(*more, marks=pytest.mark.slow) for more in ((3, "auto"), (4, "auto"), (2, "gloo"), (4, "gloo"))],
    ],
)
def test_a_rank_that_hangs_in_its_own_code_is_named_with_the_line(cwd: Path, nproc: int, transport: str) -> None:
    done = run(command(nproc, "hang", transport), cwd)
    assert done.code == 1
    assert "likely cause: rank 1 is in its own work" in done.err
    assert "in hang_here" in done.err
    assert rows(done)[0].startswith("rank 1 "), "the odd one out comes first"
    assert len(rows(done)) == nproc


@pytest.mark.parametrize(("nproc", "transport"), [(2, "auto"), pytest.param(3, "gloo", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_is_named(cwd: Path, nproc: int, transport: str) -> None:
    done = run(command(nproc, "kill", transport), cwd)
    assert done.code == 1
    assert "likely cause: rank 1 is gone without a word" in done.err
    assert rows(done)[0].startswith("rank 1 ")


def test_a_rank_that_says_why_it_ends_needs_no_table(cwd: Path) -> None:
    done = run(command(2, "raise"), cwd)
    assert done.code == 1
    assert "rank 1 failed first" in done.err
    assert "no such thing" in done.err
    assert "likely cause" not in done.err
    found = json.loads(run([*UNISONO, "doctor", "it", "--json"], cwd).out)
    assert "rank 1 raised" in found["cause"]


@pytest.mark.parametrize("transport", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
def test_ranks_whose_loops_differ_are_named(cwd: Path, transport: str) -> None:
    done = run(command(2, "barrier", transport), cwd)
    assert done.code == 1
    assert "likely cause: the ranks are in different calls" in done.err
    assert any("barrier" in line for line in rows(done))


def test_a_live_run_shows_where_it_is_and_goes_on(cwd: Path) -> None:
    with started(command(2, "slow"), cwd) as running:
        wait_until(lambda: len(steps(cwd / "it")) >= 4, 60, lambda: "no 4 steps")
        live = run([*UNISONO, "doctor", "it", "--json"], cwd)
        os.kill(running.pid, signal.SIGUSR2)
        done = running.wait()
    assert done.code == 0, done.err
    assert [row["rank"] for row in sorted(json.loads(live.out)["rows"], key=lambda row: row["rank"])] == [0, 1]
    assert all("mine.py" in " ".join(row["stack"]) for row in json.loads(live.out)["rows"])
    assert len(rows(done)) == 2, "SIGUSR2 prints the table"
    assert len(steps(cwd / "it")) == 80
