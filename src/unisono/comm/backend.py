"""A backend for everyone: shared memory under `torch.distributed` itself.

After `unisono.register_backend()`, `init_process_group("unisono")` gives raw DDP, FSDP2 or Accelerate the transport of
`comm.shm`: their scripts stay as they are. Calls are done when they return (torch lets a backend in Python answer only
with a finished future): nothing goes on behind a backward pass, which on CPUs would take the cores that it needs.
Sums are made in the order of ranks, the same bits on all of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from unisono.comm.arena import flat_bytes
from unisono.comm.connect import connect
from unisono.comm.flight import FlightRecord
from unisono.comm.shm import ShmCollectives
from unisono.errors import CommError

NAME = "unisono"
_ADDERS: dict[Any, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.AVG: torch.Tensor.add_,
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
    dist.ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    dist.ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
}
_ALIGN = 64


def register_backend() -> None:
    """Makes `torch.distributed.init_process_group("unisono")` known, for CPU tensors of ranks on one host.

    Idempotent.
    """
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make, devices=["cpu"])


def _make(store: Store, rank: int, world_size: int, timeout: timedelta) -> ShmProcessGroup:
    return ShmProcessGroup(store, rank, world_size, timeout)


class _Meeting:
    """What `connect` needs of ranks that are not connected yet: through the job's store."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._store, self._rounds = store, 0
        self.flight = FlightRecord(rank, world_size)

    def gather_objects(self, value: Any) -> list[Any]:
        self._rounds += 1
        keys = [f"unisono/{self._rounds}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], pickle.dumps(value))  # type: ignore[arg-type]
        return [pickle.loads(self._store.get(key)) for key in keys]

    def news(self, where: str, wait_s: float) -> str:
        return ""

    def abort(self) -> None:
        return None


class ShmProcessGroup(dist.ProcessGroup):
    """A process group of one host; what it does not do itself goes through gloo.

    Raises:
        CommError: the ranks cannot see each other's memory.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        self._rank, self._size = rank, world_size
        self._gloo: Any = ProcessGroupGloo(store, rank, world_size, timeout)
        self._comm: ShmCollectives | None = None
        if world_size > 1:
            found = connect(_Meeting(store, rank, world_size, timeout.total_seconds()), spin=False)
            if isinstance(found, str):
                raise CommError(f"{found}; the backend 'unisono' is for ranks of one host: use 'gloo'")
            self._comm = found

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_desc(self) -> str:
        return NAME

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def __repr__(self) -> str:
        return f"{NAME}(rank={self._rank}, size={self._size})"

    # Reductions

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        if self._comm is None or opts.reduceOp not in _ADDERS or not all(map(_is_dense, tensors)):
            return self._gloo.allreduce(tensors, opts)
        for tensor in tensors:
            self._reduce(_flat(tensor), opts.reduceOp)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def _reduce(self, flat: torch.Tensor, op: Any) -> None:
        """Each rank adds up a shard, and sends it to all."""
        comm = self._comm
        assert comm is not None
        step = -(-len(flat) // (self._size * _ALIGN)) * _ALIGN
        shards = [flat[step * rank : step * (rank + 1)] for rank in range(self._size)]
        own = shards[self._rank]
        self._add_up([[] if r == self._rank else [shards[r]] for r in range(self._size)], own, op)
        comm.all_gather([[shard] for shard in shards], channel=2).wait()

    def _add_up(self, sends: Sequence[Sequence[torch.Tensor]], own: torch.Tensor, op: Any) -> None:
        comm = self._comm
        assert comm is not None
        sizes = [[] if rank == self._rank else [len(own)] for rank in range(self._size)]
        loan = comm.lend_shards(sends, sizes, lambda n: torch.empty(n, dtype=own.dtype), channel=1)
        parts = [part for found in loan.received() for part in (found or [own])] if len(own) else []
        if parts:
            total = parts[0]
            for part in parts[1:]:
                _ADDERS[op](total, part)
            if op == dist.ReduceOp.AVG:
                total.div_(self._size)
            if total is not own:
                own.copy_(total)
        loan.done()
        loan.drain()

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if self._comm is None or opts.reduceOp not in _ADDERS:
            return self._gloo.reduce_scatter(outputs, inputs, opts)
        for output, parts in zip(outputs, inputs, strict=True):
            own = _flat(output).copy_(_flat(parts[self._rank]))
            self._add_up([[] if r == self._rank else [_flat(part)] for r, part in enumerate(parts)], own, opts.reduceOp)
        return _done(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter([output], [list(_flat(source).chunk(self._size))], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Any:
        for output, source in zip(outputs, sources, strict=True):
            self.reduce_scatter_single(output, source, opts)
        return _done(outputs)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    # Copies

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        if self._comm is None:
            return self._gloo.allgather(outputs, inputs)
        for parts, source in zip(outputs, inputs, strict=True):
            flat = [[_flat(part)] for part in parts]
            flat[self._rank][0].copy_(_flat(source))
            self._comm.all_gather(flat, channel=2).wait()
        return _done([part for parts in outputs for part in parts])

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        self.allgather([list(_flat(output).chunk(self._size))], [source], opts)
        return _done([output])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Any:
        for output, source in zip(outputs, sources, strict=True):
            self.all_gather_single(output, source, opts)
        return _done(outputs)

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        if self._comm is not None:
            self._comm.broadcast(tensors, 0 if opts is None else opts.rootRank)
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        if self._comm is not None:
            self._comm.barrier("torch.distributed.barrier()")
        return _done([])

    # The rest, as gloo has it

    def alltoall_base(self, *args: Any) -> Any:
        return self._gloo.alltoall_base(*args)

    def alltoall(self, *args: Any) -> Any:
        return self._gloo.alltoall(*args)

    def reduce(self, *args: Any) -> Any:
        return self._gloo.reduce(*args)

    def gather(self, *args: Any) -> Any:
        return self._gloo.gather(*args)

    def scatter(self, *args: Any) -> Any:
        return self._gloo.scatter(*args)

    def send(self, *args: Any) -> Any:
        return self._gloo.send(*args)

    def recv(self, *args: Any) -> Any:
        return self._gloo.recv(*args)

    def recv_anysource(self, *args: Any) -> Any:
        return self._gloo.recv_anysource(*args)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return flat_bytes(tensor.detach()).view(tensor.dtype)


def _done(values: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(values)
    return _create_work_from_future(future)
