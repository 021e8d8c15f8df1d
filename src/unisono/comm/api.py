"""The seam `Collectives`: seven verbs, and no more.

Narrow, so that another transport (shared memory, say) is one small file, and so that wrappers can count
bytes or inject faults without knowing the engine. Point-to-point at heart: every verb that moves tensors
says who sends which slice to whom, because the order of additions must stay in our hands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
class Loan(Protocol):
    """Data of others under way, to be read once."""

    def received(self) -> list[list[torch.Tensor]]:
        """Waits, and returns for each rank the pieces that it sent.

        Raises:
            CommError: a peer failed or the time-out ran out.
        """
        ...

    def done(self) -> None:
        """Gives them back: they are not to be used any more."""
        ...

    def drain(self) -> None:
        """Returns when no other rank uses what was sent any more."""
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

    @property
    def shares_memory(self) -> bool:
        """Whether ranks read each other's memory, so that work counts and not bytes sent."""
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

    def lend_shards(
        self,
        sends: Parts,
        sizes: Sequence[Sequence[int]],
        inbox: Callable[[int], torch.Tensor],
        channel: int = 0,
    ) -> Loan:
        """Starts an exchange of what is read once, or added to: nothing is copied that need not be.

        What is sent belongs to its receivers until they have done with it; they may write to it.

        Args:
            sends: As for `exchange_shards`.
            sizes: Elements of each piece that comes, for each rank.
            inbox: Returns memory for so many elements, where the pieces have to be copied; of what dtype, it says
                for 0 as well.
            channel: See `exchange_shards`.
        """
        ...

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory that is sent with the fewest copies; anything may be in it. Not collective."""
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


class CopiedLoan:
    """A `Loan` of a transport that brings data into memory of this rank.

    Args:
        exchange: Its `exchange_shards`.
        rank: This one.
        sends, sizes, inbox, channel: Of `Collectives.lend_shards`.
    """

    def __init__(
        self,
        exchange: Callable[[Parts, Parts, int], Pending],
        rank: int,
        sends: Parts,
        sizes: Sequence[Sequence[int]],
        inbox: Callable[[int], torch.Tensor],
        channel: int,
    ) -> None:
        sizes = [[] if peer == rank else list(own) for peer, own in enumerate(sizes)]
        pieces = iter(torch.split(inbox(sum(map(sum, sizes))), [size for own in sizes for size in own]))
        self._parts = [[next(pieces) for _ in own] for own in sizes]
        self._pending = exchange(sends, self._parts, channel)

    def received(self) -> list[list[torch.Tensor]]:
        self._pending.wait()
        return self._parts

    def done(self) -> None:
        self._parts = []

    def drain(self) -> None:
        self._pending.wait()
