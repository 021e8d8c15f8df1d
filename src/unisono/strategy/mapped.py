"""Mapped: a model is built in files that are mapped into memory, so that it need not fit.

Its constructors run as ever, with the same draws from the same generators, so its initial bits are those that it has
otherwise; only where its large tensors lie is another place. The system writes them out when memory is wanted, and
they are gone when the weights have been cut into shards.
"""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from unisono.strategy.offload import map_file, return_freed_memory

# Smaller ones are left where they are: a file each would cost more than they take.
_LARGE_BYTES = 1 << 20


class Mapped(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which every large new tensor on the CPU lies in a file of its own, without a name.

    Args:
        folder: On a disk; None for the system's place for temporary files.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder = folder
        return_freed_memory()
        self._areas: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
        return tree_map(lambda leaf: self._moved(leaf) if _is_new(leaf, known) else leaf, found)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        for area in self._areas:  # what was filled before
            area.madvise(mmap.MADV_DONTNEED)
        area = map_file(self._folder, tensor.nbytes)
        self._areas.add(area)
        flat = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel())
        return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu"


def _is_new(leaf: Any, known: set[int]) -> bool:
    return (
        _is_plain(leaf)
        and leaf.untyped_storage()._cdata not in known
        and leaf.nbytes >= _LARGE_BYTES
        and leaf.untyped_storage().nbytes() == leaf.nbytes
        and bool(torch.ops.aten.is_non_overlapping_and_dense.default(leaf))
    )
