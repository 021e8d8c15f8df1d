"""Meeting: ranks that share a store with starts before them agree on a word that none of those has used.

torch elastic (2.13) keeps one store for all starts of a job, and a rank that is started again finds there what ranks
of the last start have left: their addresses, say, to which nobody listens any more. Restart counts are no help: a
fresh agent of a job on several hosts counts from 0.
"""

from __future__ import annotations

import json
import time
import uuid

from torch.distributed import Store  # type: ignore[attr-defined]

from unisono.errors import CommError

_HELLO, _ACK, _GO, _FINAL = "unisono/hello/{}", "unisono/ack/{}", "unisono/go", "unisono/final"


def meet(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """Returns the word.

    Every rank says hello with a token of its own; rank 0 names a word and the tokens that it saw. Who finds its own
    token there acknowledges the word, and rank 0 makes it final when all have: so what is old is never taken for new,
    whoever comes first.

    Raises:
        CommError: a rank did not come; on rank 0 it is named.
    """
    token, deadline, pause_s = uuid.uuid4().hex, time.monotonic() + timeout_s, 0.0005
    store.set(_HELLO.format(rank), token)
    leader = _Leader(store, world_size, token) if rank == 0 else None
    accepted = ""
    while True:
        if leader is not None:
            leader.look()
        if store.check([_GO]):
            word, tokens = json.loads(store.get(_GO))
            if word != accepted and len(tokens) == world_size and tokens[rank] == token:
                accepted = word
                store.set(_ACK.format(rank), word)
        if accepted and store.check([_FINAL]) and store.get(_FINAL).decode() == accepted:
            return accepted
        if time.monotonic() > deadline:
            missing = f"; missing: rank {', '.join(map(str, leader.missing()))}" if leader else ""
            raise CommError(f"rank {rank} could not meet the other {world_size - 1} within {timeout_s:g} s{missing}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)


class _Leader:
    """Rank 0's part."""

    def __init__(self, store: Store, world_size: int, token: str) -> None:
        self._store, self._token = store, token
        self._hellos, self._acks = ([name.format(r) for r in range(world_size)] for name in (_HELLO, _ACK))
        self._seen: list[str] = []
        self._word, self._version = "", 0

    def look(self) -> None:
        """Names a new word whenever a rank has said hello anew; makes it final when all have acknowledged it."""
        if not self._store.check(self._hellos):
            return
        tokens = [value.decode() for value in self._store.multi_get(self._hellos)]
        if tokens != self._seen:
            self._seen, self._version = tokens, self._version + 1
            self._word = f"{self._token}-{self._version}"
            self._store.set(_GO, json.dumps([self._word, tokens]))
        if not self.missing():
            self._store.set(_FINAL, self._word)

    def missing(self) -> list[int]:
        """Ranks that have not acknowledged the word."""
        there = [rank for rank, key in enumerate(self._acks) if self._store.check([key])]
        return [
            rank
            for rank, key in enumerate(self._acks)
            if rank not in there or self._store.get(key).decode() != self._word
        ]
