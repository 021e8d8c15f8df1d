"""The price of a checkpoint: unisono beside torch.save and torch.distributed.checkpoint, 100 M parameters with Adam.

    python benchmarks/checkpoint.py [--nproc 2] [--millions 100] [--rounds 3] [--folder DIR] [--json]

Each system, in processes of its own: weights and Adam state as after a step, the same on every rank (unisono-zero1 has
half of the state on each). `stall`: how long the call keeps training waiting; `total`: until all is on the disk (fsync
included, which torch.save does not do by itself: `torch.save+fsync` does); `load`: weights and state from the disk back
into a model and optimizer that are there. Medians over rounds; the first round, into memory and files never used
before, is shown apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from unisono.launch.elastic import Job, launch

SYSTEMS = ("torch.save", "torch.save+fsync", "dcp.save", "dcp.async_save", "unisono-ddp", "unisono-zero1")


def build(millions: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    width = int((millions * 1e6 / 12) ** 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(12)))
    return model, torch.optim.Adam(model.parameters(), fused=False)


def peers(system: str, folder: Path, millions: float, rounds: int) -> list[dict[str, float]]:
    """Each round: {stall, total, load} in seconds."""
    dist.init_process_group("gloo")
    model, optimizer = build(millions)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    found = []
    for number in range(rounds):
        place = folder / f"{system}-{number}"
        dist.barrier()
        started = time.perf_counter()
        stall = peer_save(system, model, optimizer, place, started)
        dist.barrier()
        total = time.perf_counter() - started
        dist.barrier()
        started = time.perf_counter()
        peer_load(system, model, optimizer, place)
        dist.barrier()
        found.append({"stall": stall, "total": total, "load": time.perf_counter() - started, "bytes": size_of(place)})
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place)
    return found


def peer_save(system: str, model: nn.Module, optimizer: Any, place: Path, started: float) -> float:
    if system.startswith("torch.save"):
        if dist.get_rank() == 0:
            place.mkdir()
            with (place / "all.pt").open("wb") as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                if system.endswith("fsync"):
                    file.flush()
                    os.fsync(file.fileno())
        dist.barrier()  # the others wait, as they do in practice
        return time.perf_counter() - started
    weights, state = get_state_dict(model, optimizer)
    everything = {"model": weights, "optimizer": state}
    if system == "dcp.save":
        dcp.save(everything, checkpoint_id=place)
        return time.perf_counter() - started
    future: Any = dcp.async_save(everything, checkpoint_id=place)
    stall = time.perf_counter() - started
    future.result()
    return stall


def peer_load(system: str, model: nn.Module, optimizer: Any, place: Path) -> None:
    if system.startswith("torch.save"):
        found = torch.load(place / "all.pt", mmap=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        return
    weights, state = get_state_dict(model, optimizer)
    everything = {"model": weights, "optimizer": state}
    dcp.load(everything, checkpoint_id=place)
    set_state_dict(model, optimizer, model_state_dict=everything["model"], optim_state_dict=everything["optimizer"])


def ours(system: str, folder: Path, millions: float, rounds: int) -> list[dict[str, float]]:
    import unisono

    run = unisono.init(strategy=system.removeprefix("unisono-"), run_dir=folder / system)
    model, optimizer = build(millions)
    width = model[0].in_features
    data = torch.utils.data.TensorDataset(torch.zeros(64, width))
    size = run.world_size
    model, optimizer, loader = run.prepare(model, optimizer, data, global_batch=size, micro_batch=1)
    run.note = lambda sentence: None  # type: ignore[method-assign]
    found = []
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.barrier()
        started = time.perf_counter()
        place = run.save()
        stall = time.perf_counter() - started
        run.save(wait=True)
        run.barrier()
        total = time.perf_counter() - started
        started = time.perf_counter()
        run.resume(place)
        run.barrier()
        found.append({"stall": stall, "total": total, "load": time.perf_counter() - started, "bytes": size_of(place)})
        run.barrier()
        if run.is_main:
            shutil.rmtree(place)
        if len(found) == rounds:
            break
    return found


def size_of(place: Path) -> float:
    return float(sum(file.stat().st_size for file in place.rglob("*") if file.is_file()))


def worker(arguments: list[str]) -> None:
    system, folder, millions, rounds = arguments
    torch.set_num_threads(1)
    function: Callable[..., list[dict[str, float]]] = ours if system.startswith("unisono") else peers
    found = function(system, Path(folder), float(millions), int(rounds))
    if int(os.environ["RANK"]) == 0:
        Path(folder, f"{system}.json").write_text(json.dumps(found))
    if not system.startswith("unisono"):
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--millions", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", help="Where to write; a temporary folder by default.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for system in SYSTEMS:
            arguments = ["worker", system, folder, str(options.millions), str(options.rounds)]
            launch(Job(command=[sys.executable, __file__, *arguments], nproc=options.nproc))
            found = json.loads(Path(folder, f"{system}.json").read_text())
            later = found[1:] or found
            medians = {name: statistics.median(one[name] for one in later) for name in ("stall", "total", "load")}
            rows.append({"system": system, **medians, "first": found[0], "bytes": found[0]["bytes"]})
            if not options.json:
                first = found[0]
                print(
                    f"{system:18} stall {medians['stall']:6.2f} s  total {medians['total']:6.2f} s  load "
                    f"{medians['load']:6.2f} s  {found[0]['bytes'] / 1e6:7.0f} MB   (first: {first['stall']:.2f}, "
                    f"{first['total']:.2f}, {first['load']:.2f})",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2:])
    else:
        main()
