"""Ranks agree on a word that no start before has used, whatever that has left in the store."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from unisono.errors import CommError
from unisono.launch.meeting import meet


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def client(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=20))


def start(server: dist.TCPStore, world_size: int, late: dict[int, float]) -> set[str]:
    """Lets all ranks of one start meet; returns the words that they came to."""

    def rank(number: int) -> str:
        time.sleep(late.get(number, 0.0))
        return meet(client(server), number, world_size, 20.0)

    with ThreadPoolExecutor(world_size) as pool:
        return set(pool.map(rank, range(world_size)))


def test_every_start_has_a_word_of_its_own(server: dist.TCPStore) -> None:
    words: set[str] = set()
    for world_size in (3, 3, 2, 4, 1, 3):
        for late in ({}, {0: 0.1}, {world_size - 1: 0.1}):
            found = start(server, world_size, late)
            assert len(found) == 1
            assert not found & words
            words |= found


def test_a_rank_that_is_gone_before_the_end_does_no_harm(server: dist.TCPStore) -> None:
    """It said hello, and what it said is there when the next start begins."""
    start(server, 3, {})
    for key in ("unisono/hello/1", "unisono/ack/1"):
        server.set(key, "of a rank that is dead")
    found = start(server, 3, {1: random.uniform(0.0, 0.2), 2: random.uniform(0.0, 0.2)})
    assert len(found) == 1


def test_the_missing_are_named(server: dist.TCPStore) -> None:
    start(server, 3, {})
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(meet, client(server), rank, 3, 1.5) for rank in (0, 2)]
        with pytest.raises(CommError, match=r"rank 0 could not meet the other 2 within 1\.5 s; missing: rank 1$"):
            waiting[0].result()
        with pytest.raises(CommError, match=r"rank 2 could not meet the other 2 within 1\.5 s$"):
            waiting[1].result()
