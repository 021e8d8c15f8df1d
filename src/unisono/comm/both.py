"""Collectives of several hosts' ranks: through shared memory inside a host, over a process group between hosts.

Each message goes the shorter way by itself. Who adds what to what does not change, so neither do the bits. What all
need (`broadcast`, `all_gather`) crosses to each host once, and is passed on inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from unisono.comm.api import CopiedLoan, Loan, Parts, Pending
from unisono.comm.c10d import C10dCollectives
from unisono.comm.mailbox import CHANNELS
from unisono.comm.shm import ShmCollectives

_BROADCAST = 500_000  # a channel of the process group
_PASSED_ON = CHANNELS - 2  # a channel inside of a host


class _BothPending:
    def __init__(self, *parts: Pending) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


class _Forwarded:
    """What crosses to each host once, and is passed on inside of it by the rank that received it."""

    def __init__(self, near: Pending, far: Pending, pass_on: Callable[[], Pending]) -> None:
        self._near, self._far, self._pass_on = near, far, pass_on
        self._inside: Pending | None = None

    def wait(self) -> None:
        self._far.wait()
        self._inside = self._inside or self._pass_on()
        self._near.wait()
        self._inside.wait()


class _BothLoan:
    def __init__(self, near: Loan, far: Loan) -> None:
        self._near, self._far = near, far

    def received(self) -> list[list[torch.Tensor]]:
        return [near or far for near, far in zip(self._near.received(), self._far.received(), strict=True)]

    def done(self) -> None:
        self._near.done()
        self._far.done()

    def drain(self) -> None:
        self._near.drain()
        self._far.drain()


class TwoLevelCollectives:
    """See the module's docstring.

    Args:
        inner: The ranks of this host.
        outer: All ranks.
        hosts: Ranks by host; this rank's is one of them.
    """

    # Others' data have to arrive first, as where nothing is shared.
    shares_memory = False

    def __init__(self, inner: ShmCollectives, outer: C10dCollectives, hosts: Sequence[Sequence[int]]) -> None:
        self.inner, self.outer, self.hosts = inner, outer, [list(host) for host in hosts]
        self.rank, self.world_size, self.timeout_s = outer.rank, outer.world_size, outer.timeout_s
        self._own = next(host for host in self.hosts if self.rank in host)
        self._near = [rank in self._own for rank in range(self.world_size)]
        # Who of this host receives, from another one's rank, what all of this host need.
        self._receiver = {
            rank: self._own[number % len(self._own)] for host in self.hosts for number, rank in enumerate(host)
        }

    def _far(self, parts: Parts) -> list[Sequence[torch.Tensor]]:
        return [[] if near else part for near, part in zip(self._near, parts, strict=True)]

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inner.empty(numel, dtype, device)

    def exchange_shards(self, sends: Parts, receives: Parts, channel: int = 0) -> _BothPending:
        near = self.inner.exchange_shards(sends, receives, channel)
        return _BothPending(near, self.outer.exchange_shards(self._far(sends), self._far(receives), channel))

    def lend_shards(
        self,
        sends: Parts,
        sizes: Sequence[Sequence[int]],
        inbox: Callable[[int], torch.Tensor],
        channel: int = 0,
    ) -> _BothLoan:
        inside = [own if near else [] for near, own in zip(self._near, sizes, strict=True)]
        near = self.inner.lend_shards(sends, inside, inbox, channel)
        far = [[] if near else own for near, own in zip(self._near, sizes, strict=True)]
        exchange = self.outer.exchange_shards
        return _BothLoan(near, CopiedLoan(exchange, self.rank, self._far(sends), far, inbox, channel))

    def all_gather(self, parts: Parts, channel: int = 0) -> Pending:
        number, ranks = self._own.index(self.rank), range(self.world_size)
        counterparts = [host[number % len(host)] for host in self.hosts if self.rank not in host]
        far = self.outer.exchange_shards(
            [parts[self.rank] if rank in counterparts else [] for rank in ranks],
            [[] if self._near[rank] or self._receiver[rank] != self.rank else parts[rank] for rank in ranks],
            channel,
        )
        return _Forwarded(self.inner.all_gather(parts, channel), far, partial(self._pass_on, parts))

    def _pass_on(self, parts: Parts) -> Pending:
        """Gives the host's others what this rank has received for them, and takes what they have."""
        received: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._own}
        for rank in range(self.world_size):
            if not self._near[rank]:
                received[self._receiver[rank]] += parts[rank]
        sends = [received[self.rank] if near else [] for near in self._near]
        receives = [received.get(rank, []) for rank in range(self.world_size)]
        return self.inner.exchange_shards(sends, receives, _PASSED_ON)

    def broadcast(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        # To the first rank of each other host, which passes it on.
        firsts = [host[0] for host in self.hosts if src not in host]
        flat = [tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach() for tensor in tensors]
        flat = [part if part.dim() == 1 else part.as_strided((part.numel(),), (1,)) for part in flat]
        nothing: list[Sequence[torch.Tensor]] = [[] for _ in range(self.world_size)]
        if self.rank == src:
            sends = [flat if rank in firsts else [] for rank in range(self.world_size)]
            self.outer.exchange_shards(sends, nothing, _BROADCAST).wait()
        elif self.rank in firsts:
            receives = [flat if rank == src else [] for rank in range(self.world_size)]
            self.outer.exchange_shards(nothing, receives, _BROADCAST).wait()
        self.inner.broadcast(flat, src if src in self._own else self._own[0])

    def gather_objects(self, value: Any) -> list[Any]:
        return self.outer.gather_objects(value)

    def barrier(self, what: str = "barrier") -> None:
        self.outer.barrier(what)

    def abort(self) -> None:
        self.inner.box.stop()
        self.outer.abort()

    def close(self) -> None:
        """Gives the memory back."""
        self.inner.close()
