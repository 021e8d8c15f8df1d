"""The same weights, bit for bit, on any number of ranks; and those that plain PyTorch gives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unisono
from tests.worlds import run_world


class Samples:
    """n samples with augmentation from all three global generators."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.sin(torch.arange(3 * 8 * 8) * (index + 1.0) / 7).view(3, 8, 8)
        image = image + 0.1 * torch.randn(3, 8, 8) + 0.1 * np.random.rand() + 0.1 * random.random()
        return image.float(), index % 5


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 36, 5)
    )


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains by door 1; returns the digests before and after, and what else could differ."""
    n, batch, micro, steps = (settings[key] for key in ("n", "global_batch", "micro_batch", "steps"))
    with unisono.init(seed=settings.get("seed", 0)) as run:
        model = net()
        optimizer = settings.get("optimizer", torch.optim.AdamW)(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        _, _, loader = run.prepare(
            model,
            optimizer,
            Samples(n),
            global_batch=batch,
            micro_batch=micro,
            schedule=schedule,
            num_workers=settings.get("num_workers", 0),
            clip_norm=settings.get("clip_norm"),
        )
        before, rates, norms = run.weights_digest(), [], []
        while run.step < steps:
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step_done:
                    rates.append(optimizer.param_groups[0]["lr"])
                    norms.append(float(run._stepper._exchange.norm))
                if run.step == steps:
                    break
        state = {name: value.clone() for name, value in run.state().items()}
        return {"before": before, "after": run.weights_digest(), "rates": rates, "norms": norms, "state": state}


# Shapes that hurt: a short last step, a short last micro-batch, W that does not divide num_micro, W above the
# num_micro of a short step (203 = 5 * 40 + 3: its last step has one micro-batch of 3 samples).
SHAPES = [
    {"n": 203, "global_batch": 40, "micro_batch": 8, "steps": 13},
    {"n": 60, "global_batch": 20, "micro_batch": 3, "steps": 8},
    {"n": 37, "global_batch": 16, "micro_batch": 4, "steps": 7},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['n']}-{shape['global_batch']}")
def test_any_number_of_ranks_gives_the_same_bits(shape: dict[str, Any]) -> None:
    alone = run_world(1, train, shape)[0]
    assert alone["before"] != alone["after"]
    for world_size in (2, 3, 4):
        for found in run_world(world_size, train, shape):
            assert found["after"] == alone["after"]
            assert found["before"] == alone["before"]
            assert found["rates"] == alone["rates"]  # case 6
            assert found["norms"] == alone["norms"]


@pytest.mark.slow
def test_loader_workers_cannot_show() -> None:
    shape = SHAPES[0]
    alone = run_world(1, train, shape)[0]
    for world_size, num_workers in ((1, 2), (2, 1), (3, 2)):
        for found in run_world(world_size, train, {**shape, "num_workers": num_workers}):
            assert found["after"] == alone["after"]


def test_another_seed_gives_other_bits() -> None:
    one, other = (run_world(1, train, {**SHAPES[2], "seed": seed})[0] for seed in (0, 1))
    assert one["before"] != other["before"]
    assert one["after"] != other["after"]


def test_clipping_clips_and_stays_the_same() -> None:
    shape = {**SHAPES[1], "optimizer": torch.optim.SGD, "clip_norm": 0.05}
    alone = run_world(1, train, shape)[0]
    assert min(alone["norms"]) > 0.05, "nothing was clipped, so the test shows nothing"
    unclipped = run_world(1, train, {**shape, "clip_norm": None})[0]
    assert unclipped["after"] != alone["after"]
    for found in run_world(3, train, shape):
        assert found["after"] == alone["after"]


def plain(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same recipe in plain PyTorch, one process, without our engine: only seeds and order are ours."""
    from unisono.data.order import permutation
    from unisono.numerics.seeds import derive_seed, seed_cpu

    torch.set_num_threads(1)
    n, batch, micro, steps = (settings[key] for key in ("n", "global_batch", "micro_batch", "steps"))
    seed_cpu(derive_seed(0, "init"))
    model, data, step, epoch = net(), Samples(n), 0, 0
    optimizer = settings.get("optimizer", torch.optim.AdamW)(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    norm = model[1]
    while step < steps:
        order = permutation(0, epoch, n)(np.arange(n)).tolist()
        for start in range(0, n, batch):
            chosen = order[start : start + batch]
            micros = [chosen[i : i + micro] for i in range(0, len(chosen), micro)]
            begin = {name: value.clone() for name, value in norm.named_buffers()}
            grads, buffers = [], []
            for index, part in enumerate(micros):
                for name, value in norm.named_buffers():
                    value.copy_(begin[name])
                samples = []
                for sample in part:
                    seed_cpu(derive_seed(0, "sample", epoch, sample))
                    samples.append(data[sample])
                images, labels = torch.stack([s[0] for s in samples]), torch.tensor([s[1] for s in samples])
                seed_cpu(derive_seed(0, "micro-batch", step, index))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                grads.append([p.grad * (len(part) / micro) for p in model.parameters()])
                buffers.append({name: value.double().clone() for name, value in norm.named_buffers()})
            total = sum(len(part) / micro for part in micros)
            for parameter, parts in zip(model.parameters(), zip(*grads, strict=True), strict=True):
                parameter.grad = pairwise_sum(list(parts)) / total
            for name, value in norm.named_buffers():
                parts = [b[name] for b in buffers]
                value.copy_(pairwise_sum(parts) / len(parts) if value.is_floating_point() else parts[0])
            optimizer.step()
            schedule.step()
            step += 1
            if step == steps:
                return dict(model.state_dict())
        epoch += 1
    raise AssertionError


def pairwise_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The tree, said in another way: neighbours are added, and what is left over moves up."""
    while len(parts) > 1:
        pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda shape: f"{shape['n']}-{shape['global_batch']}")
def test_plain_pytorch_gives_the_same_bits(shape: dict[str, Any], optimizer: Any) -> None:
    settings = {**shape, "optimizer": optimizer}
    expected = run_world(1, plain, settings)[0]
    found = run_world(2, train, settings)[0]["state"]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{name} differs by {(found[name] - value).abs().max()}"
