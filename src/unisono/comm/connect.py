"""How the ranks of a host come to see each other's memory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from unisono.comm.calls import Outer
from unisono.comm.mailbox import Mailbox
from unisono.comm.peer import Peer
from unisono.comm.shm import SPINS, ShmCollectives


def connect(outer: Outer, spin: bool, host: Sequence[int] | None = None) -> ShmCollectives | str:
    """Lets the ranks of each host see each other's memory. Collective.

    Args:
        outer: All ranks.
        spin: Each has a core of its own.
        host: Those of this rank's host; default: all.

    Returns:
        The host's ranks, or why it cannot be: on all of them.
    """
    host, token = host or range(outer.world_size), secrets.randbits(62)
    own: tuple[int, Mailbox] | None = None
    peers: list[Peer] = []
    word: tuple[int, int, int] | str
    try:
        own = Mailbox.make(len(host))
        own[1].sign(token)
        word = os.getpid(), own[0], token
    except (OSError, AttributeError) as error:  # not Linux
        word = f"rank {outer.rank} has no shared memory: {error}"
    words = outer.gather_objects(word)
    reason = next((said for said in words if isinstance(said, str)), "")
    if not reason:
        try:
            for number, rank in enumerate(host):
                if rank != outer.rank:
                    pid, file, theirs = words[rank]
                    box = Mailbox.see(pid, file, len(host), theirs)
                    peers.append(Peer(rank, number, pid, box, os.pidfd_open(pid)))
        except OSError as error:
            reason = f"rank {outer.rank} cannot see the memory of the others: {error.strerror or error}"
        reason = next((said for said in outer.gather_objects(reason) if said), "")
    if own is not None:
        os.close(own[0])  # all have it mapped
    if reason or own is None:
        for peer in peers:
            os.close(peer.alive)
        return reason
    return ShmCollectives(outer, own[1], list(host).index(outer.rank), peers, SPINS if spin else 1)
