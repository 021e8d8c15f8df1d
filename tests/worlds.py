"""Real ranks for tests: a function runs on W processes that find each other as under torchrun.

Processes are forked from a server that has torch loaded already, so a world of four costs tenths of a second.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
# torch._dynamo, since the first optimizer that is made imports it: two seconds, in every rank.
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "unisono.trainer", "numpy.random"])


@dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    Attributes:
        value: What the function returned.
        error: What it raised, or None.
        trace: The traceback as text.
        exit_code: Of the process; negative for a signal; None if it had to be killed after the time-out.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exit_code: int | None = None


def run_world(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **flags: Any
) -> list[Any]:
    """Returns `function(*args)` of every rank; fails with the first traceback if a rank raised.

    Args:
        flags: Such as `strategy`: they win over what the function says, as those of `unisono run` do.
    """
    outcomes = outcomes_of_world(world_size, function, *args, timeout_s=timeout_s, **flags)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None or outcome.exit_code != 0:
            others = "\n".join(f"rank {r}: {o.exit_code} {o.error!r}" for r, o in enumerate(outcomes))
            raise AssertionError(f"rank {rank} failed:\n{outcome.trace}\n{others}")
    return [outcome.value for outcome in outcomes]


def outcomes_of_world(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **flags: Any
) -> list[Outcome]:
    """Runs `function(*args)` on every rank and says what became of each; nothing is left running."""
    if world_size == 3:  # so that both ways of a host's ranks to each other are tested by all
        flags = {"transport": "gloo", **flags}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    pipes, processes = [], []
    for rank in range(world_size):
        receiving, sending = CONTEXT.Pipe(duplex=False)
        environment = {} if world_size == 1 else _environment(rank, world_size, store.port)
        if flags:
            environment["UNISONO_JOB"] = json.dumps({"flags": flags})
        process = CONTEXT.Process(target=_child, args=(sending, environment, function, args))
        process.start()
        sending.close()
        pipes.append(receiving)
        processes.append(process)
    found: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(found) < world_size and (left := deadline - time.monotonic()) > 0:
            for ready in wait([pipe for rank, pipe in enumerate(pipes) if rank not in found], timeout=left):
                assert isinstance(ready, Connection)
                found[pipes.index(ready)] = _receive(ready)
        for rank, process in enumerate(processes):
            process.join(max(0.0, deadline - time.monotonic()))
            outcome = found.get(rank, Outcome(error=TimeoutError(f"rank {rank} gave no answer in {timeout_s} s")))
            found[rank] = Outcome(outcome.value, outcome.error, outcome.trace, process.exitcode)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()
    return [found[rank] for rank in range(world_size)]


def _receive(pipe: Connection) -> Outcome:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return Outcome(error=RuntimeError("the process ended without an answer"))


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _child(pipe: Connection, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    try:
        outcome = Outcome(value=function(*args))
    except BaseException as error:
        outcome = Outcome(error=error, trace=traceback.format_exc())
    try:
        data = pickle.dumps(outcome)
    except Exception:
        data = pickle.dumps(Outcome(error=RuntimeError(repr(outcome.error or outcome.value)), trace=outcome.trace))
    pipe.send_bytes(data)
    pipe.close()
