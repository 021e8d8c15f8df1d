"""The price of a step: unisono beside raw DDP and a step with no communication at all, in turn, in one run.

    python benchmarks/step.py [--nproc 2] [--workloads gpt,cnn,mlp,tiny] [--rounds 9] [--json]

All three train the same model on the same in-memory dataset with the same optimizer, one micro-batch a rank, one
thread each; raw DDP as its documentation says (DataLoader with DistributedSampler). Ratios are taken round by
round, since a machine's speed drifts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass(frozen=True)
class Workload:
    """A model, its data and how long a round is."""

    model: Callable[[], nn.Module]
    dataset: Callable[[], TensorDataset]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    micro_batch: int
    steps: int


class GPT(nn.Module):
    """About 5 M parameters."""

    def __init__(self, width: int = 256, depth: int = 6, vocabulary: int = 512, context: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens), mask=self.mask, is_causal=True))


def cnn() -> nn.Module:
    """About 0.09 M parameters."""

    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    return nn.Sequential(
        *block(3, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 96), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(96, 100),
    )  # fmt: skip


def mlp(width: int, depth: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    return make


def images(n: int, size: int) -> Callable[[], TensorDataset]:
    return lambda: TensorDataset(torch.randn(n, 3, size, size), torch.randint(0, 100, (n,)))


def vectors(n: int, width: int) -> Callable[[], TensorDataset]:
    return lambda: TensorDataset(torch.randn(n, width), torch.randint(0, 10, (n,)))


def tokens(n: int, context: int) -> Callable[[], TensorDataset]:
    return lambda: TensorDataset(torch.randint(0, 512, (n, context)), torch.randint(0, 512, (n, context)))


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


WORKLOADS = {
    "gpt": Workload(lambda: GPT(), tokens(2048, 128), next_token, 8, 4),
    "cnn": Workload(cnn, images(2048, 32), classify, 32, 6),
    "mlp": Workload(mlp(1200, 4), vectors(8192, 1200), classify, 64, 15),
    "tiny": Workload(mlp(64, 2), vectors(65536, 64), classify, 16, 200),
}


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class Contender:
    """One system's endless training loop."""

    def __init__(self, name: str, work: Workload, run: Any) -> None:
        torch.manual_seed(0)
        data = work.dataset()
        self.work, self.name, model = work, name, work.model()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model: nn.Module = model
        if name == "unisono-ddp":
            batch = work.micro_batch * dist.get_world_size()
            loader: Any = run.prepare(
                model, self.optimizer, data, global_batch=batch, micro_batch=work.micro_batch, drop_last=True
            )[2]
        else:
            sampler: DistributedSampler[Any] = DistributedSampler(data)
            loader = DataLoader(data, work.micro_batch, sampler=sampler, drop_last=True)
            if name == "ddp":
                self.model = DistributedDataParallel(model)
        self.batches = forever(loader)

    def steps(self) -> float:
        """Seconds a step."""
        started = time.perf_counter()
        for _ in range(self.work.steps):
            loss = self.work.loss(self.model, next(self.batches))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - started) / self.work.steps


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    import unisono

    found = []
    work = WORKLOADS[name]
    contenders = []
    runs = []
    for system in ("plain", "ddp", "unisono-ddp"):
        run = unisono.init() if system == "unisono-ddp" else None
        runs.append(run)
        contenders.append(Contender(system, work, run))
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds + 1):
        for contender in contenders[number % 3 :] + contenders[: number % 3]:
            dist.barrier()
            seconds = torch.tensor([contender.steps()])
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number:
                times[contender.name].append(seconds.item())
    num_parameters = sum(p.numel() for p in contenders[0].model.parameters())
    for system, values in times.items():
        to_plain = [value / base for value, base in zip(values, times["plain"], strict=True)]
        to_ddp = [value / base for value, base in zip(values, times["ddp"], strict=True)]
        found.append(
            {
                "workload": name,
                "parameters": num_parameters,
                "system": system,
                "nproc": dist.get_world_size(),
                "step_s": statistics.median(values),
                "ratio_to_plain": statistics.median(to_plain),
                "ratio_to_ddp": statistics.median(to_ddp),
                "spread": [min(to_ddp), max(to_ddp)],
            }
        )
    for contender in contenders:
        contender.batches.close()  # type: ignore[attr-defined]
    runs[-1].close()
    del contenders
    return found


def rank_main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name in arguments.workloads.split(","):
        rows += measure(name, arguments.rounds)
        if dist.get_rank() == 0 and not arguments.json:
            for row in rows[-3:]:
                print(
                    f"{row['workload']:>5} {row['parameters'] / 1e6:6.2f} M  {row['system']:<12} "
                    f"{1e3 * row['step_s']:8.2f} ms  {row['ratio_to_plain']:5.2f} x plain  "
                    f"{row['ratio_to_ddp']:5.3f} x ddp [{row['spread'][0]:.3f}, {row['spread'][1]:.3f}]",
                    flush=True,
                )
    if dist.get_rank() == 0 and arguments.json:
        print(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--workloads", default="gpt,cnn,mlp,tiny")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        rank_main(arguments)
        return
    from unisono.launch.elastic import Job, launch

    launch(Job(command=[sys.executable, __file__, *sys.argv[1:], "--as-rank"], nproc=arguments.nproc))


if __name__ == "__main__":
    main()
