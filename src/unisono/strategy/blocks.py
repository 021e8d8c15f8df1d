"""Which parts of a model are gathered together: its repeated blocks, and what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the members of every outermost `ModuleList` or `Sequential` that repeats a class with parameters.

    These are the layers of a transformer, the blocks of a ResNet's stages. Members without parameters are left out.
    """
    return list(_blocks(model))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        holding = [child for child in module if any(True for _ in child.parameters())]
        most = Counter(type(child) for child in holding).most_common(1)
        if most and most[0][1] > 1:
            yield from dict.fromkeys(holding)  # a block that is used twice comes once
            return
    for child in module.children():
        yield from _blocks(child)
