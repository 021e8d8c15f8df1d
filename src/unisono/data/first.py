"""Preparation that one process does first, while the others wait."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from unisono.errors import CommError


@contextlib.contextmanager
def leader_first(store: Store | None, *, rank: int, leads: bool, key: str, timeout_s: float) -> Iterator[None]:
    """Runs the body on the leader first, then on the others, which find what it left.

    Args:
        store: The job's store; None alone.
        rank: This process's, for messages.
        leads: Whether this process goes first.
        key: Of this occasion, the same on all that wait for the same leader.
        timeout_s: Longest wait for the leader.

    Raises:
        CommError: the leader failed, or took too long.
    """
    if store is None:
        yield
    elif leads:
        try:
            yield
        except BaseException as error:
            store.set(key, f"rank {rank} failed while the others waited for it: {type(error).__name__}: {error}")
            raise
        store.set(key, "")
    else:
        try:
            store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise CommError(f"rank {rank} waited {timeout_s:g} s for the first rank's preparation ({key})") from error
        if failure := store.get(key).decode():
            raise CommError(failure)
        yield


def host_key(per_host: bool) -> str:
    """The part of a key that tells hosts apart."""
    return socket.gethostname() if per_host else "job"
