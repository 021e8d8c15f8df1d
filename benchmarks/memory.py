"""What a rank keeps: unisono's strategies beside raw DDP, ZeroRedundancyOptimizer and FSDP2, float32 and Adam.

    python benchmarks/memory.py [--nproc 2] [--millions 100] [--json]

Each system trains the same stack of linear blocks for three steps, in processes of its own. `kept` is counted from live
tensors after a step: parameters, gradients and optimizer state, without activations and the batch. `peak` is the
largest resident set of a rank beyond that of a process that has joined the group and built nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SYSTEMS = ("ddp", "zero-redundancy", "fsdp2", "unisono-ddp", "unisono-zero1", "unisono-zero2", "unisono-zero3")
# Bytes a parameter in float32 with Adam, for N ranks: weights 4, gradient 4, two moments 8 (ZeRO, Rajbhandari et al.
# 2020, figure 1, has 2 + 2 + 12 for mixed precision).
FORMULAS = {
    "ddp": lambda n: 16.0,
    "zero-redundancy": lambda n: 8 + 8 / n,
    "fsdp2": lambda n: 16 / n,
    "unisono-ddp": lambda n: 16.0,
    "unisono-zero1": lambda n: 8 + 8 / n,
    "unisono-zero2": lambda n: 4 + 12 / n,
    "unisono-zero3": lambda n: 16 / n,
}


class Net(nn.Module):
    """Blocks of one square matrix each, with residuals."""

    def __init__(self, millions: float) -> None:
        super().__init__()
        depth = 12
        width = int((millions * 1e6 / depth) ** 0.5)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def live_bytes() -> int:
    """Bytes of all tensors that the process holds, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type != "meta":
            inner = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = inner.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one_rank(system: str, millions: float) -> tuple[int, int, int]:
    """Returns the number of parameters, the bytes kept after a step, and the peak beyond the start."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    importlib.import_module("torch._dynamo")  # the first optimizer that is made imports it

    base_rss, base_live = peak_rss(), live_bytes()
    model: Any = Net(millions)
    count, width = sum(p.numel() for p in model.parameters()), model.layers[0].in_features
    data = torch.utils.data.TensorDataset(torch.randn(4 * size, width))
    if system.startswith("unisono"):
        import unisono

        run = unisono.init(strategy=system.removeprefix("unisono-"))
        optimizer: Any = torch.optim.Adam(model.parameters())
        model, optimizer, loader = run.prepare(model, optimizer, data, global_batch=4 * size, micro_batch=4)
        batches = (x for _ in range(3) for (x,) in loader)
    else:
        batches = (data.tensors[0][rank * 4 : rank * 4 + 4] for _ in range(3))
        if system == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        else:
            model = nn.parallel.DistributedDataParallel(model)
        if system == "zero-redundancy":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        else:
            optimizer = torch.optim.Adam(model.parameters())
    kept = 0
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        kept = live_bytes() - base_live - sum(t.nbytes for t in data.tensors)
        optimizer.zero_grad()
    peak = peak_rss() - base_rss
    if system.startswith("unisono"):
        batches.close()
        run.close()
    del model, optimizer
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    return count, kept, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--millions", type=float, default=100)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-rank", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        found = one_rank(arguments.as_rank, arguments.millions)
        if int(os.environ["RANK"]) == 0:
            Path(arguments.out).write_text(json.dumps(found))
        return
    from unisono.launch.elastic import Job, launch

    rows = []
    for system in arguments.systems.split(","):
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "found.json")
            own = ["--as-rank", system, "--out", out, "--millions", str(arguments.millions)]
            launch(Job(command=[sys.executable, __file__, *own], nproc=arguments.nproc))
            count, kept, peak = json.loads(Path(out).read_text())
        formula = FORMULAS[system](arguments.nproc)
        row = {"system": system, "nproc": arguments.nproc, "parameters": count, "formula": formula}
        rows.append({**row, "kept": kept / count, "peak": peak / count})
        if not arguments.json:
            print(
                f"{system:<16} W={arguments.nproc}  {count / 1e6:6.1f} M  kept {kept / count:5.2f} B a parameter "
                f"(formula {formula:5.2f})  peak {peak / count:5.2f}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
