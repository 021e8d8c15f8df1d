"""What `dp` (threads or devices of one process) gains, beside `ddp` on as many processes and `torch.nn.DataParallel`.

    python benchmarks/dataparallel.py [--nproc 2] [--workloads gpt,cnn,mlp,tiny] [--micro 8] [--rounds 9] [--json]

The same step everywhere: `--micro` micro-batches, one after the other in a plain loop on one thread. Ratios to that
loop are taken round by round. `torch.nn.DataParallel` does nothing without several accelerators, so it is left out
there; it takes the whole step as one batch, as its documentation says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from step import WORKLOADS, forever
from torch import nn
from torch.utils.data import DataLoader

from unisono.execution import Execution
from unisono.launch.elastic import Job, launch
from unisono.launch.environment import Place
from unisono.opening import init, open_run


class Contender:
    """One system's endless training loop; those of one process run on rank 0 alone."""

    def __init__(self, name: str, workload: str, num_micro: int) -> None:
        torch.manual_seed(0)
        work = WORKLOADS[workload]
        self.work, self.name, self.num_micro, data = work, name, num_micro, work.dataset()
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self.device, self.model, self.run = device, work.model().to(device), None
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.alone = name != "unisono-ddp"
        batch, micro = num_micro * work.micro_batch, work.micro_batch
        if name.startswith("unisono"):
            how = Execution(strategy="dp", workers=int(os.environ["WORLD_SIZE"]))
            self.run = open_run(Place(0, 1, 0, 1), how, seed=0, threads=1) if self.alone else init()
            parts = self.run.prepare(
                self.model, self.optimizer, data, global_batch=batch, micro_batch=micro, drop_last=True
            )
            loader: Any = parts[2]
        else:
            loader = DataLoader(data, batch if name == "DataParallel" else micro, shuffle=True, drop_last=True)
        if name == "DataParallel":
            self.model = nn.DataParallel(self.model)
        self.batches = forever(loader)

    def step(self) -> None:
        """One optimizer step of this rank."""
        of_rank = 1 if self.name == "DataParallel" else self.num_micro
        if not self.alone:
            of_rank //= dist.get_world_size()
        for _ in range(of_rank):
            loss = self.work.loss(self.model, [part.to(self.device) for part in next(self.batches)])
            if self.run is None:
                (loss / of_rank).backward()
            else:
                self.run.backward(loss)
                self.optimizer.step()
        if self.run is None:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self) -> float:
        """Of a step, on all ranks together."""
        dist.barrier()
        started = time.perf_counter()
        steps = max(1, self.work.steps // 2)
        if not self.alone or dist.get_rank() == 0:
            for _ in range(steps):
                self.step()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        dist.barrier()
        return (time.perf_counter() - started) / steps

    def close(self) -> None:
        """Ends its run."""
        self.batches.close()  # type: ignore[attr-defined]
        if self.run is not None:
            self.run.close()


def measure(workload: str, num_micro: int, rounds: int) -> list[dict[str, Any]]:
    names = ["plain", "unisono-dp", "unisono-ddp"]
    if torch.accelerator.is_available() and torch.accelerator.device_count() > 1:
        names.append("DataParallel")
    # Before there is a process group: dp is one process.
    mine = [name for name in names if name != "unisono-ddp" and os.environ["RANK"] == "0"]
    contenders = {name: Contender(name, workload, num_micro) for name in mine}
    dist.init_process_group("gloo")
    contenders["unisono-ddp"] = Contender("unisono-ddp", workload, num_micro)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if name in contenders:
                seconds = contenders[name].seconds()
            else:
                dist.barrier()
                dist.barrier()
                seconds = 0.0
            if number:
                times[name].append(seconds)
    for contender in contenders.values():
        contender.close()
    if dist.get_rank() != 0:
        return []
    found = []
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, times["plain"], strict=True)]
        found.append(
            {
                "workload": workload,
                "system": name,
                "nproc": dist.get_world_size(),
                "step_s": statistics.median(values),
                "ratio_to_plain": statistics.median(ratios),
                "spread": [min(ratios), max(ratios)],
            }
        )
    return found


def rank_main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for row in measure(arguments.as_rank, arguments.micro, arguments.rounds):
        low, high = row["spread"]
        print(
            json.dumps(row)
            if arguments.json
            else f"{row['workload']:>5}  {row['system']:<12} {1e3 * row['step_s']:8.2f} ms  "
            f"{row['ratio_to_plain']:5.2f} x plain [{low:.2f}, {high:.2f}]",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--workloads", default="gpt,cnn,mlp,tiny")
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        rank_main(arguments)
        return
    for workload in arguments.workloads.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--as-rank", workload]
        launch(Job(command=command, nproc=arguments.nproc))


if __name__ == "__main__":
    main()
