"""Processes and hosts come and go in the middle of a run: it ends with the digest of a whole one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.commands import InProcess, run, started, steps, wait_until
from tests.e2e.test_resume import RECIPE, TRAIN, records

NAP = ["--set", "nap_s=0.04"]
LONG_NAP = ["--set", "nap_s=0.15"]


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(RECIPE)
    return tmp_path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_rank_that_is_killed_is_not_replaced(cwd: Path) -> None:
    whole = run([*TRAIN, "--nproc", "1", *NAP, "--run-dir", "whole", "--json"], cwd).summary
    options = ["--nproc", "1:2", "--run-dir", "it", "--checkpoint-every", "2", "--json"]
    with started([*TRAIN, *options, *NAP], cwd) as running:
        wait_until(lambda: len(steps(cwd / "it")) >= 5, 120, lambda: "no 5 steps")
        os.kill(running.rank(1), signal.SIGKILL)
        done = running.wait()
        running.wait_until_gone(5)
    summary = done.summary
    assert "rank 1 failed" in done.err and "1 of 2 processes go on" in done.err
    assert re.search(r"goes on after step [1-9]", done.err), done.err
    assert (summary["nproc"], summary["restarts"]) == (1, 1)
    assert summary["weights_digest"] == whole["weights_digest"]
    assert records(cwd / "it") == records(cwd / "whole")


def test_wrong_input_is_not_tried_again(cwd: Path) -> None:
    (cwd / "mine.py").write_text(RECIPE.replace("torch.randn(6)", "torch.full((6,), torch.nan)"))
    done = run([*TRAIN, "--nproc", "1:2", "--run-dir", "it"], cwd)
    assert done.code == 2 and "is nan" in done.err
    assert "go on" not in done.err


@pytest.mark.slow
def test_a_host_leaves_and_another_joins(cwd: Path) -> None:
    whole = run([*TRAIN, "--nproc", "1", *LONG_NAP, "--run-dir", "whole", "--json"], cwd).summary
    port = free_port()
    options = ["--nproc", "1", "--nnodes", "1:2", "--rdzv", f"localhost:{port}", "--json"]
    command = [*TRAIN, *options, *LONG_NAP, "--run-dir", "it", "--checkpoint-every", "3"]

    def reached(step: int, world_size: int) -> None:
        def there() -> bool:
            with contextlib.suppress(OSError, IndexError):
                return (
                    steps(cwd / "it")[-1]["step"] >= step
                    and len(list((cwd / "it" / "logs").glob("rank-*"))) == world_size
                )
            return False

        wait_until(there, 120, lambda: f"no step {step} on {world_size} ranks")

    def first_keeps_it() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with started(command, cwd) as first:
        wait_until(first_keeps_it, 60, lambda: "no meeting point")
        with started(command, cwd) as second:
            reached(5, 2)
            os.kill(second.pid, signal.SIGKILL)
            second.wait()
            second.wait_until_gone(5)
        (cwd / "it" / "logs" / "rank-1.log").unlink()
        reached(9, 1)
        with started(command, cwd) as third:
            done, other = first.wait(), third.wait()
            third.wait_until_gone(5)
        first.wait_until_gone(5)
    went_on = [int(step) for step in re.findall(r"goes on after step (\d+)", done.err)]
    assert len(went_on) == 2 and went_on[0] >= 3 and went_on[1] >= 8, done.err
    assert (cwd / "it" / "logs" / "rank-1.log").exists(), "the third took part"
    for summary in (done.summary, other.summary):
        assert summary["weights_digest"] == whole["weights_digest"]
    assert records(cwd / "it") == records(cwd / "whole")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--nproc", "3:2"], ["--nproc 3:2", "MIN is above MAX"]),
        (["--nproc", "two"], ["--nproc two", "MIN:MAX"]),
        (["--nproc", "1:2:3"], ["--nproc 1:2:3", "MIN:MAX"]),
        (["--nnodes", "2"], ["--nnodes 2", "--rdzv HOST:PORT"]),
        (["--nnodes", "2", "--rdzv", "localhost"], ["--rdzv localhost", "HOST:PORT"]),
        (["--nnodes", "2", "--rdzv", "no.such.host.invalid:29500"], ["no.such.host.invalid"]),
        (["--nnodes", "2", "--rdzv", "localhost:29500"], ["--run-dir", "all of them see"]),
        (["--nnodes", "1:2", "--nproc", "1:2", "--rdzv", "localhost:29500"], ["--nproc 1:2", "one number"]),
    ],
)
def test_wrong_numbers(
    cwd: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    parts: list[str],
) -> None:
    unisono = InProcess(monkeypatch, capfd, cwd)
    done = unisono("train", "mine.py", *options)
    assert done.code == 2
    assert done.err.count("\n") == 1
    for part in parts:
        assert part in done.err
    assert not (cwd / "runs").exists()
