"""The seam `Collectives`: six verbs, and no more.

Narrow, so that another transport (shared memory, say) is one small file, and so that wrappers can count
bytes or inject faults without knowing the engine. Point-to-point at heart: every verb that moves tensors
says who sends which slice to whom, because the order of additions must stay in our hands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

Parts = Sequence[Sequence[torch.Tensor]]


@runtime_checkable
class Pending(Protocol):
    """Data in flight."""

    def wait(self) -> None:
        """Returns when all sends may be overwritten and all receives are there.

        Raises:
            CommError: a peer failed or the time-out ran out.
        """
        ...


@runtime_checkable
class Collectives(Protocol):
    """What an engine needs from the outside world.

    Collective: every rank calls the same verbs in the same order. A rank that does not makes the others end
    with a `CommError` that names it, within the time-out.
    """

    @property
    def rank(self) -> int:
        """This process's rank, 0 <= rank < world_size."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    def exchange_shards(self, sends: Parts, receives: Parts, channel: int = 0) -> Pending:
        """Starts to send `sends[r]` to rank r and to receive `receives[r]` from it.

        Shape:
            Both have one entry a rank, each a list of contiguous tensors; the list that rank r receives from
            rank q must match, tensor by tensor, what q sends to r. Entries of this rank itself are ignored.

        Calls match in order within one `channel`, so that one kind of message may overtake another where the
        transport can (gloo, shared memory); on all others calls match in the order of all.
        """
        ...

    def all_gather(self, parts: Parts, channel: int = 0) -> Pending:
        """Starts to fill `parts[r]` on every rank with rank r's own `parts[r]`.

        Shape:
            One list of contiguous tensors a rank; sizes may differ, but are the same on every rank.
        """
        ...

    def broadcast(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        """Overwrites `tensors` on every rank with those of rank `src`."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's picklable `value`, in rank order, on every rank."""
        ...

    def barrier(self, what: str = "barrier") -> None:
        """Returns when every rank has called it; the error names the ranks that did not."""
        ...

    def abort(self) -> None:
        """Drops the connections so that waiting peers end at once; idempotent, never blocks."""
        ...
