"""The command line under test: called in this process, or started in one of its own and watched through /proc."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

UNISONO = [sys.executable, "-m", "unisono"]
JOB = "COMMANDS_JOB"  # marks a command and all its descendants, also those that lost their parent

# What another launcher may have left in the environment of this session.
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "UNISONO_JOB")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        """What `--json` printed: the whole of standard output must be one object."""
        assert self.code == 0, self.err
        found: dict[str, Any] = json.loads(self.out)
        return found


class InProcess:
    """Calls the command as the entry point does, without the seconds that a new process needs for torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cwd: Path) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "path", list(sys.path))  # a recipe's folder is put there
        for name in OF_LAUNCHERS:
            monkeypatch.delenv(name, raising=False)

    def __call__(self, *arguments: str) -> Done:
        import torch

        from unisono.cli.app import main

        self._monkeypatch.setattr(sys, "argv", ["unisono", *arguments])
        threads, modules = torch.get_num_threads(), set(sys.modules)
        self._capfd.readouterr()
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        finally:
            torch.set_num_threads(threads)
            for name in set(sys.modules) - modules:
                if name.startswith("unisono_recipe_"):
                    del sys.modules[name]
        out, err = self._capfd.readouterr()
        return Done(code, out, err)


class Running:
    """A command under way, with all that it started.

    Args:
        command: Program and arguments.
        cwd: Where it runs; standard output and error go to files beside.
    """

    def __init__(
        self, command: list[str], cwd: Path, environ: Mapping[str, str] | None = None, stderr: int | None = None
    ) -> None:
        self.mark = f"{JOB}={uuid.uuid4().hex}".encode()
        name, _, value = self.mark.decode().partition("=")
        inherited = {k: v for k, v in os.environ.items() if k not in OF_LAUNCHERS}
        self._streams = (cwd / f"{value}.out", cwd / f"{value}.err")
        with self._streams[0].open("w") as out, self._streams[1].open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**inherited, **(environ or {}), name: value},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err if stderr is None else stderr,
                start_new_session=True,  # a group of its own, so that a test can signal it as a terminal does
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def pids(self) -> dict[int, dict[str, str]]:
        """Living processes of this command: their ids, with the environment they were started in."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                items = (folder / "environ").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if self.mark in items and state not in "ZX":
                    found[int(folder.name)] = dict(
                        item.decode(errors="replace").partition("=")[::2] for item in items if b"=" in item
                    )
        return found

    def rank(self, rank: int) -> int:
        """The process id of a rank, not of its loader workers."""
        found = self.pids()
        mine = [pid for pid, environ in found.items() if environ.get("RANK") == str(rank)]
        return next(pid for pid in mine if _parent(pid) not in mine)

    def wait(self, timeout_s: float = 120.0) -> Done:
        code = self.process.wait(timeout_s)
        return Done(code, *(stream.read_text() for stream in self._streams))

    def wait_until_gone(self, timeout_s: float) -> None:
        """Fails, and names what is left, if not every process of the command has ended by then."""
        wait_until(lambda: not self.pids(), timeout_s, lambda: f"still there: {self.pids().keys()}")

    def kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.process.wait()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def started(command: list[str], cwd: Path, **options: Any) -> Iterator[Running]:
    """Starts a command; whatever happens, nothing of it is left afterwards."""
    running = Running(command, cwd, **options)
    try:
        yield running
    finally:
        running.kill()


def run(command: list[str], cwd: Path, timeout_s: float = 240.0, **options: Any) -> Done:
    """Runs a command to its end; fails if it leaves a process behind."""
    with started(command, cwd, **options) as running:
        done = running.wait(timeout_s)
        running.wait_until_gone(5)
        return done


def wait_until(
    condition: Callable[[], Any], timeout_s: float, what: Callable[[], str] = lambda: "it did not happen"
) -> Any:
    """Returns what `condition` returns once that is true; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"after {timeout_s} s: {what()}"
        time.sleep(0.02)
    return found


def records(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics.jsonl so far."""
    try:
        lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def steps(folder: Path) -> list[dict[str, Any]]:
    """Of those, the records of steps."""
    return [record for record in records(folder) if "event" not in record]
