"""Systems: the same training step as each system's own documentation says it, with the same AdamW and data.

Each function sets one up, in a process group's rank, and returns its step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from unisono.bench.workloads import Workload
from unisono.comm.backend import register_backend
from unisono.launch.environment import detect
from unisono.opening import init

Step = Callable[[], None]
LR = 1e-4

OURS = [f"unisono-{s}-{t}" for t in ("shm", "gloo") for s in ("ddp", "zero1", "zero2", "zero3")]
# The last two are torch's own, on our transport.
TORCH = ["ddp", "zero-redundancy", "fsdp2", "ddp-on-shm", "fsdp2-on-shm"]
# The module that a peer needs.
PEERS = {
    "accelerate": "accelerate",
    "fabric": "lightning_fabric",
    **{f"deepspeed-{stage}": "deepspeed" for stage in range(4)},
}


def installed() -> list[str]:
    """Peers that can be measured here."""
    return [name for name, module in PEERS.items() if importlib.util.find_spec(module) is not None]


def make_step(system: str, work: Workload) -> Step:
    """Sets a system up on this rank; returns what does one step."""
    torch.manual_seed(0)
    system, _, on = system.partition("-on-")
    backend = "gloo"
    if on:
        register_backend()
        backend = "unisono"
    if system in ("plain", *TORCH):
        dist.init_process_group(backend)
    kind, *rest = system.split("-")
    if kind == "unisono":
        return _unisono(work, *rest)
    if kind == "deepspeed":
        return _deepspeed(work, int(rest[0]))
    return _MAKERS[system](work)


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _loop(
    work: Workload,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
) -> Step:
    batches = _forever(loader)

    def step() -> None:
        loss = work.loss(model, next(batches))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def _sampled(work: Workload) -> Any:
    data = work.dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    return DataLoader(data, work.micro_batch, sampler=sampler, drop_last=True)


def _unisono(work: Workload, strategy: str, transport: str) -> Step:
    run = init(strategy=strategy, transport=transport)
    model = work.model()
    batch = work.micro_batch * run.world_size
    model, optimizer, loader = run.prepare(
        model, _adamw(model), work.dataset(), global_batch=batch, micro_batch=work.micro_batch, drop_last=True
    )
    return _loop(work, model, optimizer, loader)


def _plain(work: Workload) -> Step:
    """No communication at all: what all others are compared with."""
    model = work.model()
    return _loop(work, model, _adamw(model), _sampled(work))


def _ddp(work: Workload) -> Step:
    model = nn.parallel.DistributedDataParallel(work.model())
    return _loop(work, model, _adamw(model), _sampled(work))


def _zero_redundancy(work: Workload) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(work.model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=LR)
    return _loop(work, model, optimizer, _sampled(work))


def _fsdp2(work: Workload) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = work.model()
    for block in work.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(work, model, _adamw(model), _sampled(work))


def _accelerate(work: Workload) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = work.model()
    loader = DataLoader(work.dataset(), work.micro_batch, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, _adamw(model), loader)
    return _loop(work, model, optimizer, loader, accelerator.backward)


def _fabric(work: Workload) -> Step:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=detect().local_world_size, strategy="ddp")
    fabric.launch()
    made = work.model()
    model, optimizer = fabric.setup(made, _adamw(made))
    loader = fabric.setup_dataloaders(DataLoader(work.dataset(), work.micro_batch, shuffle=True, drop_last=True))
    return _loop(work, model, optimizer, loader, fabric.backward)


def _deepspeed(work: Workload, stage: int) -> Step:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    model = work.model()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches = _forever(_sampled(work))

    def step() -> None:
        engine.backward(work.loss(engine, next(batches)))
        engine.step()

    return step


_MAKERS = {
    "plain": _plain,
    "ddp": _ddp,
    "zero-redundancy": _zero_redundancy,
    "fsdp2": _fsdp2,
    "accelerate": _accelerate,
    "fabric": _fabric,
}
