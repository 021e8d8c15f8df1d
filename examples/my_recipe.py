"""Door 2: a recipe. `unisono train examples/my_recipe.py --nproc 2 --set width=128`."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono


def recipe(width: int = 64, lr: float = 1e-2, seed: int = 0) -> unisono.Recipe:
    """Inside a circle or not; every keyword here is an option of the command line."""
    return unisono.Recipe(
        model=lambda: nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=lambda: circle(1600, seed=1),
        eval=lambda: circle(400, seed=2),
        metrics=lambda model, batch: {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))},
        global_batch=128,
        micro_batch=16,
        epochs=5,
        seed=seed,
    )


def circle(n: int, seed: int) -> TensorDataset:
    """n points and whether they lie inside a circle."""
    inputs = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(inputs, (inputs.square().sum(1) < 0.6).long())
