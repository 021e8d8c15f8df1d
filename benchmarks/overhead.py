"""The engine's own work in a step: unisono on one process beside a plain loop over the same batches.

    python benchmarks/overhead.py [--json]

No communication and next to no arithmetic: what is left is Python and small kernels. The plain loop takes its batches
by index from the same tensors, as unisono does, so that data costs both the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono

STEPS, ROUNDS, BATCH = 150, 15, 8


def network(depth: int) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(depth)], nn.Linear(16, 10))


def plain_batches(data: TensorDataset) -> Iterator[Any]:
    while True:
        for indices in torch.randperm(len(data)).split(BATCH):
            yield [tensor[indices] for tensor in data.tensors]


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> float:
    started = time.thread_time()  # CPU time, so that a busy machine does not show
    for _ in range(STEPS):
        x, y = next(batches)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.thread_time() - started) / STEPS


def measure(run: unisono.Run, depth: int) -> dict[str, Any]:
    data = TensorDataset(torch.randn(65536, 16), torch.randint(0, 10, (65536,)))
    loops: list[Callable[[], float]] = []
    for prepared in (False, True):
        model = network(depth)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batches = plain_batches(data)
        if prepared:
            batches = endless(run.prepare(model, optimizer, data, global_batch=BATCH, name=f"depth{depth}")[2])
        loops.append(lambda model=model, optimizer=optimizer, batches=batches: steps(model, optimizer, batches))
    pairs = [[loop() for loop in loops] for _ in range(ROUNDS + 1)][1:]
    extra = statistics.median(ours - plain for plain, ours in pairs)
    tensors = 2 * (depth + 1)
    return {
        "parameter_tensors": tensors,
        "plain_us": 1e6 * statistics.median(plain for plain, _ in pairs),
        "engine_us": 1e6 * extra,
        "goal_us": 300 + 10 * tensors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rows = []
    for depth in (1, 4, 25, 100):
        with unisono.init() as run:  # one run a size: several optimizers in one run would share its steps
            rows.append(measure(run, depth))
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            f"{row['parameter_tensors']:4d} parameter tensors: plain {row['plain_us']:7.0f} us, "
            f"engine {row['engine_us']:6.0f} us (goal {row['goal_us']} us)"
        )


if __name__ == "__main__":
    main()
