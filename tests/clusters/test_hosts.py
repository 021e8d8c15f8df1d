"""Several hosts, each in a network namespace of its own: the weights are those of one process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.network import Host, hosts, need_namespaces
from tests.commands import UNISONO, Running, run, started, steps, wait_until
from tests.e2e.test_resume import RECIPE, TRAIN

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    need_namespaces()


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(RECIPE)
    return tmp_path


def whole(cwd: Path, *options: str) -> str:
    summary = run([*TRAIN, "--nproc", "1", *options, "--run-dir", "whole", "--json"], cwd).summary
    digest: str = summary["weights_digest"]
    return digest


@contextlib.contextmanager
def on(all_hosts: list[Host], command: list[str], cwd: Path) -> Iterator[list[Running]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(started(host.command(*command), cwd)) for host in all_hosts]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_two_hosts_of_two_train_as_one_process_does(cwd: Path, strategy: str) -> None:
    wanted = whole(cwd)
    options = ["--nproc", "2", "--nnodes", "2", "--rdzv", "n1:29511", "--strategy", strategy, "--run-dir", "it"]
    with hosts(2) as both, on(both, [*TRAIN, *options, "--json"], cwd) as running:
        ends = [each.wait() for each in running]
        assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
        for end in ends:
            assert end.summary["weights_digest"] == wanted
            assert (end.summary["nproc"], end.summary["strategy"]) == (4, strategy)
        assert all(host.sent_bytes() > 10_000 for host in both), "they talked to each other"
        for each in running:
            each.wait_until_gone(5)


def test_a_gradient_crosses_between_hosts_once_and_not_once_a_rank(cwd: Path) -> None:
    width, num_steps = 50_000, 10
    gradient = 4 * (6 * width + width + 3 * width + 3)  # bytes
    (cwd / "mine.py").write_text(RECIPE.replace("nn.BatchNorm1d(width), ", ""))  # whose statistics would cross too
    size = ["--set", f"width={width}", "--steps", str(num_steps)]
    options = ["--nproc", "2", "--nnodes", "2", "--rdzv", "n1:29511", "--run-dir", "it", "--json"]
    with hosts(2) as both, on(both, [*TRAIN, *options, *size], cwd) as running:
        ends = [each.wait() for each in running]
        assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
        sent = [host.sent_bytes() / (num_steps * gradient) for host in both]
    # Half for the sums, half for the results; the first host also sends the initial weights. 2 without two levels.
    assert 0.9 < sent[1] < 1.2, sent
    assert 0.9 < sent[0] < 1.35, sent


def test_a_host_whose_cable_is_pulled_leaves_and_comes_back(cwd: Path) -> None:
    nap = ["--set", "nap_s=0.2"]
    wanted = whole(cwd, *nap)
    options = ["--nproc", "1", "--nnodes", "1:2", "--rdzv", "n1:29511", "--run-dir", "it", "--checkpoint-every", "3"]
    with hosts(2) as both, on(both, [*TRAIN, *options, *nap, "--json"], cwd) as running:
        wait_until(lambda: len(steps(cwd / "it")) >= 4, 120, lambda: "no 4 steps")
        os.killpg(running[1].pid, signal.SIGKILL)
        running[1].wait()
        both[1].link("down")
        before = len(steps(cwd / "it"))
        wait_until(lambda: len(steps(cwd / "it")) >= max(9, before + 3), 120, lambda: "the other does not go on")
        both[1].link("up")
        with started(both[1].command(*TRAIN, *options, *nap, "--json"), cwd) as again:
            ends = [running[0].wait(), again.wait()]
    for end in ends:
        assert end.code == 0, end.err
        assert end.summary["weights_digest"] == wanted
    assert "goes on after step" in ends[0].err
    record: dict[str, Any] = json.loads((cwd / "it" / "summary.json").read_text())
    assert record["nproc"] == 2, "it took part again"


def test_hosts_that_do_not_see_each_other_say_so(cwd: Path) -> None:
    with hosts(2) as both:
        both[0].link("down")
        command = [*UNISONO, "train", "mine.py", "--nnodes", "2", "--rdzv", "n1:29511", "--run-dir", "it"]
        done = run(both[1].command(*command), cwd, timeout_s=200)
    assert done.code == 1
    assert "10.77.0.1:29511" in done.err
