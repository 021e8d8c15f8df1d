"""Shared memory between ranks: what only this transport can get wrong."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.worlds import outcomes_of_world, run_world
from unisono.comm.arena import Arena
from unisono.comm.mailbox import RING_BYTES
from unisono.comm.shm import ShmCollectives
from unisono.errors import CommError

CPU = torch.device("cpu")


def comm_of(run: Any) -> ShmCollectives:
    comm = run._session.comm
    assert isinstance(comm, ShmCollectives)
    return comm


def many_small_ones() -> None:
    """More than the ring holds, to a rank that comes late; and, from then on, past its end again and again."""
    with unisono.init() as run:
        comm = comm_of(run)
        size, number = 1_000, 3 * RING_BYTES // 4_000
        pendings, found = [], []
        if comm.rank == 1:
            time.sleep(0.3)
        for k in range(number):
            parts = [[torch.full((size,), float(comm.rank * number + k))] for _ in range(comm.world_size)]
            found.append([[torch.empty(size)] for _ in range(comm.world_size)])
            pendings.append(comm.exchange_shards(parts, found[-1]))
        for k, pending in enumerate(pendings):
            pending.wait()
            for peer in range(comm.world_size):
                if peer != comm.rank:
                    assert found[k][peer][0].unique().tolist() == [peer * number + k]


def test_a_full_ring_waits_for_its_readers() -> None:
    run_world(3, many_small_ones, transport="shm")


def large_ones() -> int:
    with unisono.init() as run:
        comm = comm_of(run)
        model = [torch.full((n,), float(comm.rank)) for n in [1, 5_000_000, 0, 3, *[10] * 5_000]]
        comm.broadcast(model, src=1)
        assert all(bool((part == 1).all()) for part in model)
        del model
        # Staged memory is used again, so that its size is that of what is under way.
        for _ in range(20):
            parts = [[torch.full((500_000,), float(rank == comm.rank))] for rank in range(comm.world_size)]
            comm.all_gather(parts).wait()
            assert all(bool((part[0] == 1).all()) for part in parts)
        return sum(len(chunk.memory) for chunk in comm._arena._chunks)


def test_large_and_many_pieces_arrive_and_memory_is_used_again() -> None:
    for num_bytes in run_world(2, large_ones):
        assert num_bytes < 40_000_000


def diverges(kind: str) -> str:
    run = unisono.init(timeout_s=20)
    comm, other = comm_of(run), run.rank == 1
    parts = [[torch.zeros(11 if other and kind == "size" else 10)] for _ in range(comm.world_size)]
    try:
        if other and kind == "verb":
            comm.all_gather(parts).wait()
        else:
            comm.exchange_shards(parts, parts).wait()
        comm.barrier("the end")
    except CommError as error:
        run.close(failed=True)
        return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(("kind", "words"), [("verb", "the ranks' loops differ"), ("size", "expects [40]")])
def test_ranks_that_diverge_are_told_at_once(kind: str, words: str) -> None:
    started = time.monotonic()
    outcomes = outcomes_of_world(2, diverges, kind)
    assert time.monotonic() - started < 15, "not by the time-out"
    assert words in outcomes[0].value
    assert "rank 1" in outcomes[0].value


def unseen() -> tuple[str, list[str]]:
    notes: list[str] = []
    unisono.run.Run.note = lambda self, sentence: notes.append(sentence)  # type: ignore[method-assign]
    if os.environ["RANK"] == "1":
        os.memfd_create = _no_memory  # type: ignore[assignment]
    with unisono.init() as run:
        assert run.mean(float(run.rank)) == 0.5
        return type(run._session.comm).__name__, notes


def _no_memory(*args: Any) -> int:
    raise OSError(28, "No space left on device")


def test_where_memory_cannot_be_shared_all_ranks_use_gloo_and_say_so() -> None:
    for kind, notes in run_world(2, unseen):
        assert kind == "C10dCollectives"
        assert len(notes) == 1 and "rank 1" in notes[0] and "No space left" in notes[0] and "gloo" in notes[0]


def leaves() -> None:
    run = unisono.init()
    comm = comm_of(run)
    comm.empty(1_000_000, torch.float32, CPU).fill_(1.0)
    comm.barrier("the end of them all")
    os.kill(os.getpid(), 9)


def test_nothing_is_left_when_all_are_killed() -> None:
    before = set(Path("/dev/shm").iterdir())
    outcomes = outcomes_of_world(3, leaves, transport="shm")
    assert [outcome.exit_code for outcome in outcomes] == [-9] * 3
    assert {path.name for path in set(Path("/dev/shm").iterdir()) - before if "unisono" in path.name} == set()


def test_an_arena_gives_memory_out_again_and_knows_its_own() -> None:
    arena = Arena()
    first = arena.empty(10_000)
    place = arena.locate(first)
    assert place is not None and arena.locate(first[100:]) == (place[0], place[1] + 100)
    assert arena.locate(torch.zeros(10)) is None
    view = first[5_000:].view(torch.float32)
    del first
    other = arena.empty(10_000)
    assert arena.locate(other) != place, "a view keeps it"
    del view
    assert arena.locate(arena.empty(12_000)) == place, "as many pages"
    large = arena.empty(9_000_000).fill_(7)
    arena.close()
    assert int(large[-1]) == 7
