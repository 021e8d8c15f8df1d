"""Collectives over a torch process group: gloo, nccl, xccl.

Everything is sends and receives between pairs. Measured on gloo over loopback (2 ranks, 26 MB, medians):
an exchange of halves takes 9.7 ms this way and 12.2 ms as `all_to_all_single`, which also cannot carry a
different number of pieces from each rank; the gather of halves likewise 9.7 ms against 14.8 ms; an
all-reduce, for the same bytes as both together, 22.3 ms.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from unisono.comm.api import CopiedLoan, Parts
from unisono.comm.flight import FlightRecord
from unisono.errors import CommError

# Of messages of `gather_objects`; no strategy uses so large a one.
_OBJECTS = 1_000_000


class C10dPending:
    """Point-to-point works in flight; keeps their tensors alive until they are done."""

    def __init__(self, owner: C10dCollectives, verb: str, call: int, works: Sequence[Any], keep: Any) -> None:
        self._owner, self._verb, self._call, self._works, self._keep = owner, verb, call, works, keep

    def wait(self) -> None:
        flight = self._owner.flight
        flight.wait_for(self._call)
        with self._owner.explained(f"{self._verb} (call {self._call})"):
            for work in self._works:
                work.wait()
        flight.wait_for(0)
        flight.end(self._call)
        self._works, self._keep = (), None


class C10dCollectives:
    """`Collectives` over the default process group.

    Args:
        store: The job's key-value store; a rank that failed leaves word in it for the others.
        timeout_s: Longest wait for the peers in one call.

    Units: `timeout_s` in seconds.
    """

    shares_memory = False

    def __init__(self, store: Store, timeout_s: float, flight: FlightRecord | None = None) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.timeout_s = timeout_s
        self._store = PrefixStore("unisono/comm", store)
        self.flight = flight or FlightRecord(self.rank, self.world_size)
        self._barriers = 0
        self._aborted = False

    def exchange_shards(self, sends: Parts, receives: Parts, channel: int = 0) -> C10dPending:
        return self._exchange("exchange_shards", sends, receives, channel)

    def _exchange(self, verb: str, sends: Parts, receives: Parts, channel: int) -> C10dPending:
        call = self.flight.begin(verb, sum(part.nbytes for parts in sends for part in parts))
        operations = []
        for distance in range(1, self.world_size):
            # Everyone starts with its right-hand neighbour, so that no rank is everybody's first target.
            to, frm = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            operations += [dist.P2POp(dist.isend, part, to, tag=channel) for part in sends[to] if part.numel()]
            operations += [dist.P2POp(dist.irecv, part, frm, tag=channel) for part in receives[frm] if part.numel()]
        with self.explained(f"{verb} (call {call})"):
            works = dist.batch_isend_irecv(operations) if operations else []
        return C10dPending(self, verb, call, works, (sends, receives))

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

    def all_gather(self, parts: Parts, channel: int = 0) -> C10dPending:
        return self._gather("all_gather", parts, channel)

    def _gather(self, verb: str, parts: Parts, channel: int) -> C10dPending:
        return self._exchange(verb, [parts[self.rank]] * self.world_size, parts, channel)

    def broadcast(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        call = self.flight.begin("broadcast", sum(tensor.nbytes for tensor in tensors) * (src == self.rank))
        with self.explained(f"broadcast (call {call})"):
            works = [dist.broadcast(tensor, src, async_op=True) for tensor in tensors]
        C10dPending(self, "broadcast", call, works, tensors).wait()

    def gather_objects(self, value: Any) -> list[Any]:
        # As sends and receives too: gloo's own collectives leave a thread behind for a moment, and a process that ends
        # in that moment aborts (torch 2.13: 3 of 14 runs that ended after `all_gather_object`, 0 of 25 this way).
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = data.numel()
        self._gather("gather_objects", [[sizes[r : r + 1]] for r in range(self.world_size)], _OBJECTS).wait()
        found = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
        found[self.rank] = data
        self._gather("gather_objects", [[part] for part in found], _OBJECTS).wait()
        return [pickle.loads(part.numpy().tobytes()) for part in found]

    def barrier(self, what: str = "barrier") -> None:
        """Through the store, which knows who has come, and who will not: a device's own barrier names nobody."""
        self._barriers += 1
        call = self.flight.begin("barrier", 0)
        self.flight.wait_for(call)
        keys = [f"barrier/{self._barriers}/{rank}" for rank in range(self.world_size)]
        started, pause_s = time.monotonic(), 0.001
        try:
            self._store.set(keys[self.rank], what)
            while not self._store.check(keys):
                if time.monotonic() - started > self.timeout_s:
                    self.flight.ask_others()
                    raise CommError(f"rank {self.rank} waited {self.timeout_s:g} s in {what}{self._missing(keys)}")
                if self._stopped():
                    raise CommError(f"rank {self.rank} waits in {what} for nothing{self._news()}")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.02)
            if self._barriers > 1:  # everyone is here, so everyone has left the one before
                self._store.delete_key(f"barrier/{self._barriers - 1}/{self.rank}")
            self.flight.wait_for(0)
            self.flight.end(call)
        except RuntimeError as error:
            raise CommError(
                f"rank {self.rank} lost the job's store in {what}: rank 0 or the launcher is gone"
            ) from error

    def _stopped(self) -> list[int]:
        """Ranks that have said that they failed."""
        return [rank for rank in range(self.world_size) if self._store.check([f"stopped/{rank}"])]

    def _missing(self, keys: Sequence[str]) -> str:
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        return f"; missing: rank {', '.join(map(str, missing))}{self._news()}. Every rank must call it"

    def abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            with contextlib.suppress(Exception):
                self._post("its own code")
            if dist.is_initialized():
                dist.destroy_process_group()

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turns torch's errors into one that says which call, and what the other ranks last said."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0][:300]
            raise CommError(f"rank {self.rank} could not finish {what}: {reason}{self.news(what, 2.0)}") from error

    def news(self, where: str, wait_s: float) -> str:
        """Tells the others that this rank stops in `where`; returns what they have said, as the end of a sentence."""
        self.flight.ask_others()
        with contextlib.suppress(Exception):
            self._post(where)
        return self._news(wait_s)

    def _post(self, where: str) -> None:
        self._store.set(f"stopped/{self.rank}", json.dumps({"where": where}))

    def _news(self, wait_s: float = 0.0) -> str:
        """Says where the other ranks stopped, and which said nothing: those are gone or hang."""
        deadline, told, silent = time.monotonic() + wait_s, [], list(range(self.world_size))
        silent.remove(self.rank)
        while silent:
            for rank in list(silent):
                try:
                    if not self._store.check([f"stopped/{rank}"]):
                        continue
                    where = json.loads(self._store.get(f"stopped/{rank}"))["where"]
                except Exception:
                    return "; rank 0's store is gone, so the job has ended"
                silent.remove(rank)
                told.append(f"rank {rank} stopped in {where}")
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        if silent:
            told.append(f"no word from rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} (gone, or hanging)")
        return "; " + "; ".join(told) if told else ""
