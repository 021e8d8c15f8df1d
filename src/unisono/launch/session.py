"""Session: this process's device, threads and connections, opened in one place and closed in one order."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from unisono.comm.api import Collectives
from unisono.comm.both import TwoLevelCollectives
from unisono.comm.c10d import C10dCollectives
from unisono.comm.connect import connect
from unisono.comm.flight import FlightRecord
from unisono.comm.local import LocalCollectives
from unisono.comm.shm import ShmCollectives
from unisono.errors import CommError
from unisono.launch.environment import Place, usable_cores
from unisono.launch.meeting import meet

TRANSPORTS = ("auto", "shm", "gloo")


@dataclass
class Session:
    """What a run stands on.

    Attributes:
        place: Rank and world size.
        device: Where models go.
        comm: The ranks.
        store: The job's key-value store; None alone.
        timeout_s: Longest wait for a peer.
        flight: What this rank does with the others.
        fallback: Why ranks of one host do not share memory; empty where they do, or are not to.
    """

    place: Place
    device: torch.device
    comm: Collectives
    store: Store | None
    timeout_s: float
    flight: FlightRecord = field(default_factory=FlightRecord)
    fallback: str = ""
    _owns_group: bool = False

    def close(self, failed: bool = False, wait: bool = True) -> None:
        """Ends the connections; waits for the other ranks first, unless the run failed. Idempotent.

        Raises:
            CommError: a rank did not come to the end of the run.
        """
        store, self.store = self.store, None
        if store is None:
            return
        try:
            if wait and not failed:
                # The host of the store must not leave while others still talk to it.
                self.comm.barrier("the end of the run")
        finally:
            if failed:
                self.comm.abort()
            elif self._owns_group:
                dist.destroy_process_group()
            if isinstance(self.comm, ShmCollectives | TwoLevelCollectives):
                self.comm.close()
            self.flight.close()


def pick_device(local_rank: int) -> torch.device:
    """Returns this rank's accelerator where the machine has some, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def open_session(place: Place, *, threads: int, timeout_s: float, transport: str = "auto") -> Session:
    """Joins the job.

    Units: `timeout_s` in seconds.

    Raises:
        CommError: the other ranks did not come within the time-out.
    """
    torch.set_num_threads(threads)
    device = pick_device(place.local_rank)
    if device.type != "cpu":
        # Bits that a kernel's scheduling decides are no one's recipe; a kernel without a fixed form warns.
        torch.use_deterministic_algorithms(True, warn_only=True)
    flight = FlightRecord(place.rank, place.world_size)
    if place.world_size == 1 and not dist.is_initialized():
        return Session(place, device, LocalCollectives(), None, timeout_s, flight)
    if dist.is_initialized():  # the user's own group; it stays theirs
        store = dist.distributed_c10d._get_default_store()
        comm, fallback = _nearest(place, device, C10dCollectives(store, timeout_s, flight), threads, transport)
        return Session(place, device, comm, store, timeout_s, flight, fallback)
    timeout = timedelta(seconds=timeout_s)
    backend = dist.get_default_backend_for_device(device)
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{backend}"
    try:
        store, rank, world_size = next(rendezvous(place.rendezvous, place.rank, place.world_size, timeout=timeout))
        store.set_timeout(timeout)
        if place.launcher_has_store:
            store = PrefixStore(meet(store, rank, world_size, timeout_s), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        raise CommError(
            f"rank {place.rank} could not meet the other {place.world_size - 1} within {timeout_s:g} s: "
            f"{str(error).splitlines()[0]}"
        ) from error
    comm, fallback = _nearest(place, device, C10dCollectives(store, timeout_s, flight), threads, transport)
    return Session(place, device, comm, store, timeout_s, flight, fallback, _owns_group=True)


def _nearest(
    place: Place, device: torch.device, outer: C10dCollectives, threads: int, transport: str
) -> tuple[Collectives, str]:
    """The ranks through memory that they share, where they share a host; else as torch has connected them, and why."""
    if transport == "gloo" or device.type != "cpu":
        return outer, ""
    words = outer.gather_objects(place.host)
    hosts = [[rank for rank, other in enumerate(words) if other == word] for word in dict.fromkeys(words)]
    if len(hosts) == outer.world_size:
        return outer, "every rank is on a host of its own: gloo instead of shm" if transport == "shm" else ""
    own = next(host for host in hosts if outer.rank in host)
    found = connect(outer, threads * len(own) <= usable_cores(), own)
    if isinstance(found, str):
        return outer, f"{found}; gloo instead of shm, which is slower"
    return (found if len(hosts) == 1 else TwoLevelCollectives(found, outer, hosts)), ""
