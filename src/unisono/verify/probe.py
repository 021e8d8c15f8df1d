"""Probe: how fast memory and the ranks of this host are. `python -m unisono.verify.probe TRANSPORT` is one rank."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from unisono.comm.api import Collectives
from unisono.errors import UnisonoError
from unisono.launch.environment import detect, environment_of_rank
from unisono.launch.guard import die_with_parent
from unisono.launch.hosts import free_port
from unisono.launch.session import open_session

_ELEMENTS = 4 * 1024 * 1024  # float32: 16 MB, more than caches of one core hold
_TRIES = 7
_LIMIT_S = 60.0


class ProbeError(UnisonoError):
    """Ranks could not be measured."""


def _least(act: Callable[[], object]) -> float:
    """Seconds of the fastest of some tries, after one to warm up."""
    found = []
    for _ in range(_TRIES + 1):
        started = time.perf_counter()
        act()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def memory_bandwidth() -> float:
    """Returns bytes a second that one core reads and writes, both counted."""
    source = torch.ones(4 * _ELEMENTS)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _least(lambda: target.copy_(source))


def all_reduce(transport: str, world_size: int) -> tuple[str, float, float]:
    """Starts ranks on this host and measures them.

    Returns:
        What connected them ("shm" or "gloo"), seconds of an all-reduce of 16 MB, and of one of 8 bytes.

    Raises:
        ProbeError: a rank failed, with its last line, or gave no answer within a minute.
    """
    port, command = free_port(), [sys.executable, "-m", "unisono.verify.probe", transport]
    ranks = [
        subprocess.Popen(
            command,
            env=environment_of_rank(rank, world_size, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + _LIMIT_S
    try:
        said = [rank.communicate(timeout=max(0.1, deadline - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{world_size} ranks over {transport} gave no answer within {_LIMIT_S:g} s") from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for number, (rank, (_, error)) in enumerate(zip(ranks, said, strict=True)):
        if rank.returncode:
            last = (error.strip().splitlines() or ["without a word"])[-1]
            raise ProbeError(f"{world_size} ranks over {transport}: rank {number} ended: {last[:300]}")
    found = json.loads(said[0][0])
    return found["by"], found["large_s"], found["small_s"]


def _reduce(comm: Collectives, values: torch.Tensor) -> None:
    """The bytes of `ddp`: each rank adds up its part, and sends it to all."""
    parts = list(torch.tensor_split(values, comm.world_size))
    own = parts[comm.rank]
    sends = [[] if rank == comm.rank else [part] for rank, part in enumerate(parts)]
    sizes = [[] if rank == comm.rank else [own.numel()] for rank in range(comm.world_size)]
    loan = comm.lend_shards(sends, sizes, lambda numel: torch.empty(numel))
    for pieces in loan.received():
        for piece in pieces:
            own += piece
    loan.done()
    comm.all_gather([[part] for part in parts]).wait()
    loan.drain()


def main() -> None:
    """The entry of every rank."""
    die_with_parent()
    session = open_session(detect(), threads=1, timeout_s=_LIMIT_S / 2, transport=sys.argv[1])
    comm = session.comm
    seconds = []
    for numel in (_ELEMENTS, comm.world_size):
        values = comm.empty(numel, torch.float32, torch.device("cpu")).zero_()
        seconds.append(_least(partial(_reduce, comm, values)))
    session.close()
    if comm.rank == 0:
        by = "shm" if comm.shares_memory else "gloo"
        sys.stdout.write(json.dumps({"by": by, "large_s": seconds[0], "small_s": seconds[1]}))


if __name__ == "__main__":
    main()
