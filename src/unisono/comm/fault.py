"""Fails on schedule: wraps any `Collectives` so that users can test what their own loops do then."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from unisono.comm.api import Collectives, Loan, Parts, Pending


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where and when.

    Attributes:
        rank: On which rank.
        verb: In which verb; "any" counts all of them.
        call: At which call of it, the first is 0.
        kind: "raise" a RuntimeError, "delay" by `delay_s`, "hang" for ever, or "kill" the process by SIGKILL.
        delay_s: Seconds.
    """

    rank: int
    verb: str
    call: int
    kind: Literal["raise", "delay", "hang", "kill"]
    delay_s: float = 0.1


class FaultyCollectives:
    """Passes every call on to `inner`, after the faults that are due on this rank."""

    def __init__(self, inner: Collectives, faults: Sequence[Fault]) -> None:
        self.inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.shares_memory = inner.shares_memory
        self._faults = [fault for fault in faults if fault.rank == inner.rank]
        self._counts: Counter[str] = Counter()

    def _due(self, verb: str) -> None:
        due = [f for f in self._faults if f.verb in (verb, "any") and f.call == self._counts[f.verb]]
        self._counts.update((verb, "any"))  # first, so that a caller that tries again after "raise" gets through
        for fault in due:
            self._inflict(fault, verb)

    def _inflict(self, fault: Fault, verb: str) -> None:
        if fault.kind == "raise":
            raise RuntimeError(f"fault on rank {self.rank} in {verb}, call {fault.call}")
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(fault.delay_s if fault.kind == "delay" else 1e9)

    def exchange_shards(self, sends: Parts, receives: Parts, channel: int = 0) -> Pending:
        self._due("exchange_shards")
        return self.inner.exchange_shards(sends, receives, channel)

    def lend_shards(
        self,
        sends: Parts,
        sizes: Sequence[Sequence[int]],
        inbox: Callable[[int], torch.Tensor],
        channel: int = 0,
    ) -> Loan:
        self._due("lend_shards")
        return self.inner.lend_shards(sends, sizes, inbox, channel)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inner.empty(numel, dtype, device)

    def all_gather(self, parts: Parts, channel: int = 0) -> Pending:
        self._due("all_gather")
        return self.inner.all_gather(parts, channel)

    def broadcast(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        self._due("broadcast")
        self.inner.broadcast(tensors, src)

    def gather_objects(self, value: Any) -> list[Any]:
        self._due("gather_objects")
        return self.inner.gather_objects(value)

    def barrier(self, what: str = "barrier") -> None:
        self._due("barrier")
        self.inner.barrier(what)

    def abort(self) -> None:
        self.inner.abort()
