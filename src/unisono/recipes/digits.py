"""A small CNN with BatchNorm on scikit-learn's handwritten digits: 1797 images of 8x8, nothing to download."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from unisono import Recipe
from unisono.errors import InputError

NUM_IMAGES = 1797
EVAL_EVERY = 5
NUM_TRAIN = NUM_IMAGES - math.ceil(NUM_IMAGES / EVAL_EVERY)


def recipe(
    *,
    width: int = 32,
    dropout: float = 0.1,
    lr: float = 0.03,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    epochs: int = 15,
    global_batch: int = 128,
    micro_batch: int = 16,
    seed: int = 0,
) -> Recipe:
    """Defines the run; every keyword is an option, such as `--set width=64`."""
    steps = epochs * math.ceil(NUM_TRAIN / global_batch)
    return Recipe(
        model=partial(CNN, width=width, dropout=dropout),
        loss=loss,
        optimizer=partial(sgd, lr=lr, momentum=momentum, weight_decay=weight_decay),
        schedule=partial(cosine, steps=steps),
        train=train_digits,
        eval=eval_digits,
        metrics=metrics,
        epochs=epochs,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=seed,
    )


class CNN(nn.Module):
    """Three convolutions, each with BatchNorm, then one linear layer.

    BatchNorm normalises by the micro-batch, so `micro_batch` is part of what is trained.
    """

    def __init__(self, *, width: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *convolution(1, width),
            *convolution(width, width),
            nn.MaxPool2d(2),  # 8x8 -> 4x4
            *convolution(width, 2 * width),
            nn.MaxPool2d(2),  # 4x4 -> 2x2
        )
        self.dropout = nn.Dropout(dropout)
        self.classes = nn.Linear(2 * width * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns (batch, 10) logits of (batch, 1, 8, 8) images."""
        logits: Tensor = self.classes(self.dropout(self.features(images).flatten(1)))
        return logits


def convolution(channels_in: int, channels_out: int) -> list[nn.Module]:
    """Returns a 3x3 convolution with its BatchNorm, which makes the convolution's own bias idle."""
    return [nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()]


class Digits(Dataset[tuple[Tensor, int]]):
    """Images of 8x8 with their class, moved by up to one pixel each way where `augment` is on.

    The moves come from Python's and numpy's global generators, as in much existing code: unisono seeds both
    for every sample, so neither a loader worker nor a process count can change them.
    """

    def __init__(self, images: NDArray[np.float32], labels: NDArray[np.int64], *, augment: bool) -> None:
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.augment:
            down, right = random.randint(-1, 1), np.random.randint(-1, 2)
            image = np.pad(image, 1)[1 + down : 9 + down, 1 + right : 9 + right]
        return torch.from_numpy(image[None].copy()), int(self.labels[index])


def train_digits() -> Digits:
    """Returns four fifths of the images, augmented."""
    return load(evaluation=False)


def eval_digits() -> Digits:
    """Returns every fifth image as it is."""
    return load(evaluation=True)


def load(*, evaluation: bool) -> Digits:
    """Returns one side of the split.

    Raises:
        InputError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("the recipe 'digits' needs scikit-learn: pip install 'unisono[digits]'") from error
    data = load_digits()
    chosen = (np.arange(len(data.target)) % EVAL_EVERY == 0) == evaluation
    images = data.images[chosen].astype(np.float32) / 16  # pixels are 0 .. 16
    return Digits(images, data.target[chosen].astype(np.int64), augment=not evaluation)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the mean cross entropy of a micro-batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Returns sums with their counts, which evaluation adds up and divides once."""
    images, labels = batch
    logits = model(images)
    return {
        "loss": (F.cross_entropy(logits, labels, reduction="sum"), len(labels)),
        "accuracy": ((logits.argmax(-1) == labels).sum(), len(labels)),
    }


def sgd(parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> torch.optim.SGD:
    """Returns SGD with Nesterov momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=momentum > 0)


def cosine(optimizer: torch.optim.Optimizer, *, steps: int) -> LambdaLR:
    """Returns a schedule that falls to zero over `steps`."""
    return LambdaLR(optimizer, partial(cosine_factor, steps=steps))


def cosine_factor(step: int, *, steps: int) -> float:
    """Returns what the learning rate is multiplied by at `step`."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
