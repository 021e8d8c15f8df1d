"""Counts what crosses the seam: which verbs, in which order, how many bytes. For tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.comm.api import Collectives, Loan, Parts, Pending


@dataclass(frozen=True)
class Call:
    """One call of a verb.

    Attributes:
        verb: Its name.
        num_bytes: Bytes this rank sent to others.
    """

    verb: str
    num_bytes: int = 0


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class RecordingCollectives:
    """Passes every call on to `inner` and keeps it in `calls`."""

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.shares_memory = inner.shares_memory
        self.calls: list[Call] = []

    def exchange_shards(self, sends: Parts, receives: Parts, channel: int = 0) -> Pending:
        sent = sum(_bytes(parts) for rank, parts in enumerate(sends) if rank != self.rank)
        self.calls.append(Call("exchange_shards", sent))
        return self.inner.exchange_shards(sends, receives, channel)

    def lend_shards(
        self,
        sends: Parts,
        sizes: Sequence[Sequence[int]],
        inbox: Callable[[int], torch.Tensor],
        channel: int = 0,
    ) -> Loan:
        sent = sum(_bytes(parts) for rank, parts in enumerate(sends) if rank != self.rank)
        self.calls.append(Call("lend_shards", sent))
        return self.inner.lend_shards(sends, sizes, inbox, channel)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inner.empty(numel, dtype, device)

    def all_gather(self, parts: Parts, channel: int = 0) -> Pending:
        self.calls.append(Call("all_gather", _bytes(parts[self.rank]) * (self.world_size - 1)))
        return self.inner.all_gather(parts, channel)

    def broadcast(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        sent = _bytes(tensors) * (self.world_size - 1) if src == self.rank else 0
        self.calls.append(Call("broadcast", sent))
        self.inner.broadcast(tensors, src)

    def gather_objects(self, value: Any) -> list[Any]:
        self.calls.append(Call("gather_objects"))
        return self.inner.gather_objects(value)

    def barrier(self, what: str = "barrier") -> None:
        self.calls.append(Call("barrier"))
        self.inner.barrier(what)

    def abort(self) -> None:
        self.inner.abort()
