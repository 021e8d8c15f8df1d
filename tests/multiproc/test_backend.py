"""The backend for torch.distributed: what it answers, beside gloo; raw DDP and FSDP2 on it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unisono
from tests.worlds import outcomes_of_world, run_world
from unisono.errors import CommError


def connected(backend: str) -> None:
    unisono.register_backend()
    unisono.register_backend()
    dist.init_process_group(backend, timeout=timedelta(seconds=30))


def verbs(backend: str) -> list[torch.Tensor]:
    connected(backend)
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for numel in (0, 1, 63, 5_000, 100_001):
        mine = torch.arange(numel).add(rank + 1).float()
        ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
        for op in ops if numel else ():
            value = mine.clone().remainder_(5)
            dist.all_reduce(value, op)
            found.append(value)
        gathered = [torch.empty(numel) for _ in range(size)]
        dist.all_gather(gathered, mine)
        found += gathered
        whole = torch.empty(size * numel)
        dist.all_gather_into_tensor(whole, mine)
        found.append(whole)
        part = torch.empty(numel)
        dist.reduce_scatter_tensor(part, torch.arange(size * numel).float() * (rank + 1))
        found.append(part)
        value = mine.clone()
        dist.broadcast(value, size - 1)
        found.append(value)
    # Dense, not contiguous; other types; what shared memory does not do.
    image = (torch.arange(24).float() * (rank + 1)).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    dist.all_reduce(image)
    half = torch.full((1000,), 0.5 + rank, dtype=torch.bfloat16)
    dist.all_reduce(half)
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    strided = torch.arange(20.0)[::2]
    dist.all_reduce(strided)
    to_first = torch.ones(3) * (rank + 1)
    dist.reduce(to_first, 0)
    exchanged = torch.empty(size)
    dist.all_to_all_single(exchanged, torch.arange(size).float() + 10 * rank)
    if rank == 0:
        dist.send(torch.ones(2), size - 1)
    if rank == size - 1:
        got = torch.zeros(2)
        dist.recv(got, 0)
        found.append(got)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [item["rank"] for item in objects] == list(range(size))
    work = dist.all_reduce(bits, async_op=True)
    assert work is not None
    work.wait()
    dist.barrier()
    pair = dist.new_group([0, 1])
    if rank < 2:
        both = torch.tensor([float(rank)])
        dist.all_reduce(both, group=pair)
        found.append(both)
    found += [image, half, bits, strided, exchanged, *([to_first] if rank == 0 else [])]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_answers_as_gloo_does(world_size: int) -> None:
    wanted, found = run_world(world_size, verbs, "gloo"), run_world(world_size, verbs, "unisono")
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(ours) == len(theirs) > 30
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride()


def average() -> torch.Tensor:
    connected("cpu:unisono")
    value = torch.arange(10_000.0) * (1 + dist.get_rank())
    dist.all_reduce(value, dist.ReduceOp.AVG)
    dist.destroy_process_group()
    return value


def test_it_can_average() -> None:
    for value in run_world(2, average):
        assert torch.equal(value, torch.arange(10_000.0) * 1.5)


def train(kind: str, backend: str) -> torch.Tensor:
    connected(backend)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(30, 70), nn.ReLU(), nn.BatchNorm1d(70), nn.Linear(70, 10))
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in (model[0], model[3]):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        nn.functional.cross_entropy(model(torch.randn(8, 30)), torch.randint(0, 10, (8,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [param.full_tensor() if kind == "fsdp2" else param for param in model.parameters()]
    found = torch.cat([weight.detach().flatten() for weight in weights]).clone()
    dist.barrier()
    del model, optimizer, weights
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_scripts_of_torch_train_on_it(kind: str) -> None:
    wanted, found = run_world(2, train, kind, "gloo"), run_world(2, train, kind, "unisono")
    assert torch.equal(found[0], found[1])
    torch.manual_seed(0)
    assert not torch.allclose(found[0][:2100], nn.Linear(30, 70).weight.detach().flatten(), atol=1e-3), "it moved"
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)


def unseen() -> None:
    if os.environ["RANK"] == "1":
        os.memfd_create = _no_memory  # type: ignore[assignment]
    connected("unisono")


def _no_memory(*args: Any) -> int:
    raise OSError(28, "No space left on device")


def test_where_memory_cannot_be_shared_it_says_what_to_use() -> None:
    for outcome in outcomes_of_world(2, unseen):
        assert isinstance(outcome.error, CommError)
        assert "rank 1" in str(outcome.error) and "use 'gloo'" in str(outcome.error)
