"""A byte-level GPT on the text of Python's own standard library: real data, nothing to download."""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from unisono import Recipe
from unisono.errors import InputError

VOCABULARY = 256
OUTSIDE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
EVAL_FRACTION = 0.05
EVAL_WINDOWS = 256


def recipe(
    *,
    width: int = 128,
    depth: int = 3,
    heads: int = 4,
    context: int = 64,
    dropout: float = 0.1,
    lr: float = 3e-3,
    warmup: int = 20,
    weight_decay: float = 0.1,
    steps: int = 600,
    global_batch: int = 32,
    micro_batch: int = 4,
    seed: int = 0,
) -> Recipe:
    """Defines the run; every keyword is an option, such as `--set width=192`.

    Raises:
        InputError: `heads` does not divide `width`.
    """
    if width % heads:
        raise InputError(f"width {width} must be a multiple of heads {heads}")
    return Recipe(
        model=partial(GPT, width=width, depth=depth, heads=heads, context=context, dropout=dropout),
        loss=loss,
        optimizer=partial(adamw, lr=lr, weight_decay=weight_decay),
        schedule=partial(warmup_then_cosine, warmup=warmup, steps=steps),
        train=partial(train_windows, context),
        eval=partial(eval_windows, context),
        metrics=metrics,
        sample=partial(sample, context=context),
        steps=steps,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=seed,
        clip_norm=1.0,
    )


class Block(nn.Module):
    """Causal self-attention and a GELU MLP, each normalised before and added after."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (batch, length, width) of the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        # No dropout inside: on CPU that leaves the flash kernel (4 x 64 bytes, 4 heads of 32: 2.4 ms against 1.0).
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.attention_out(attended.transpose(1, 2).reshape(batch, length, width)))
        x = x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))
        return x


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the embedding is also the output layer."""

    def __init__(self, *, width: int, depth: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.bytes.weight
        for table in (self.bytes, self.positions):  # the head has the same weight: start near even odds
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns (batch, length, 256) logits of (batch, length) bytes; length is at most `context`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.bytes(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Returns the mean cross entropy, in nats, of each byte after the first."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def metrics(model: nn.Module, batch: Tensor) -> dict[str, tuple[Tensor, int]]:
    """Returns sums with their counts, which evaluation adds up and divides once."""
    logits, targets = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
    return {
        "loss": (F.cross_entropy(logits, targets, reduction="sum"), targets.numel()),
        "accuracy": ((logits.argmax(-1) == targets).sum(), targets.numel()),
    }


def adamw(parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Returns AdamW that decays matrices, but not biases and norms."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def warmup_then_cosine(optimizer: torch.optim.Optimizer, *, warmup: int, steps: int) -> LambdaLR:
    """Returns a schedule that rises for `warmup` steps, then falls to a twentieth at the last of `steps`."""
    return LambdaLR(optimizer, partial(lr_factor, warmup=warmup, steps=steps))


def lr_factor(step: int, *, warmup: int, steps: int) -> float:
    """Returns what the learning rate is multiplied by at `step`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


class Windows(Dataset[Tensor]):
    """Windows of `context` bytes and the one after, side by side: each byte is predicted once.

    With `limit`, at most so many of them, evenly spread over the text.
    """

    def __init__(self, text: NDArray[np.uint8], context: int, limit: int | None = None) -> None:
        windows = np.lib.stride_tricks.sliding_window_view(text, context + 1)[::context]  # a view, not a copy
        self.windows = windows if limit is None else windows[:: max(1, len(windows) // limit)][:limit]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.windows[index].astype(np.int64))


def train_windows(context: int) -> Windows:
    """Returns all but the end of the text."""
    text = standard_library()
    return Windows(text[: -int(EVAL_FRACTION * len(text))], context)


def eval_windows(context: int) -> Windows:
    """Returns a sample of the end of the text, which training never sees."""
    text = standard_library()
    return Windows(text[-int(EVAL_FRACTION * len(text)) :], context, EVAL_WINDOWS)


def standard_library() -> NDArray[np.uint8]:
    """Returns all modules of the running Python's standard library, in the order of their paths, as one array.

    Raises:
        InputError: this Python has no sources of its library.
    """
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in OUTSIDE]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise InputError(f"the recipe 'stdlib-gpt' learns from Python's own *.py files, but {root} has none")
    return np.frombuffer(b"".join(path.read_bytes() for path in sorted(files, key=Path.as_posix)), np.uint8)


@torch.no_grad()
def sample(model: nn.Module, *, context: int, prompt: str = "def ", length: int = 300) -> str:
    """Returns `prompt` and `length` more bytes, the same ones each time; leaves `model` in eval mode."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    tokens = list(prompt.encode())
    for _ in range(length):
        # A generator of our own, on the CPU: the global ones and the kind of device play no part in the draw.
        logits = model(torch.tensor([tokens[-context:]], device=device))[0, -1].float().cpu()
        tokens += torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator).tolist()
    return bytes(tokens).decode(errors="replace")
