"""A world of one: the same code path, nothing to send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.comm.api import CopiedLoan, Parts


class Done:
    """A `Pending` with nothing left to wait for."""

    def wait(self) -> None:
        return None


class LocalCollectives:
    """`Collectives` for one process."""

    rank = 0
    world_size = 1
    shares_memory = False

    def exchange_shards(self, sends: Parts, receives: Parts, channel: int = 0) -> Done:
        return Done()

    def lend_shards(
        self,
        sends: Parts,
        sizes: Sequence[Sequence[int]],
        inbox: Callable[[int], torch.Tensor],
        channel: int = 0,
    ) -> CopiedLoan:
        return CopiedLoan(self.exchange_shards, self.rank, sends, sizes, inbox, channel)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(self, parts: Parts, channel: int = 0) -> Done:
        return Done()

    def broadcast(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        return None

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self, what: str = "barrier") -> None:
        return None

    def abort(self) -> None:
        return None
