"""Offload: optimizer state that does not fit where the weights are.

"cpu" keeps it, and a copy of what this rank updates, in the host's memory, and updates there (ZeRO-Offload: Ren et
al. 2021). "disk" keeps it in files mapped into memory, and touches one piece after the other, so that the system may
write the rest out (the lowest tier of ZeRO-Infinity: Rajbhandari et al. 2021).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.errors import InputError
from unisono.numerics.layout import ALIGN_BYTES

KINDS = ("cpu", "disk")


@dataclass(frozen=True)
class Offload:
    """Where state goes.

    Attributes:
        kind: "cpu" or "disk".
        folder: For "disk"; None for the system's place for temporary files.
    """

    kind: str
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"offload '{self.kind}' is neither cpu nor disk")
        if self.folder is not None and not self.folder.is_dir():
            raise InputError(f"the folder for offload does not exist: {self.folder}")


class DiskShelf:
    """Files that hold the state of pieces, one each, without a name: they are gone when the process is.

    Args:
        folder: On a disk; a folder in memory would defeat the purpose.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        return_freed_memory()
        self._areas: dict[int, tuple[mmap.mmap, frozenset[int]]] = {}

    def put(self, key: int, state: dict[str, Any]) -> None:
        """Moves the tensors of one piece's state into its file, and lets go of the memory.

        Args:
            key: Of the piece.
            state: Its tensors are replaced by ones that live in the file.

        Raises:
            InputError: the disk is full.
        """
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() and v.numel()}
        if not tensors:
            return
        area, known = self._areas.get(key, (None, frozenset()))
        if area is None or any(tensor.data_ptr() not in known for tensor in tensors.values()):
            area = map_file(self._folder, sum(_padded(tensor.nbytes) for tensor in tensors.values()))
            offset = 0
            for name, tensor in tensors.items():
                flat = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
                dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
                place = flat.as_strided(tensor.shape, tensor.stride()) if dense else flat.view(tensor.shape)
                state[name] = place.copy_(tensor)
                offset += _padded(tensor.nbytes)
            self._areas[key] = (area, frozenset(state[name].data_ptr() for name in tensors))
        area.madvise(mmap.MADV_DONTNEED)  # of a shared file mapping: the file keeps what was written


def map_file(folder: Path | None, num_bytes: int) -> mmap.mmap:
    """Returns memory that lies in a new file without a name.

    Raises:
        InputError: the disk is full.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk shows now, not as a crash while writing
            return mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise InputError(
            f"{num_bytes / 1e6:.1f} MB cannot be put into {where}: {error.strerror}; choose a folder with --offload-dir"
        ) from error


def return_freed_memory() -> None:
    """Has glibc give freed blocks from 1 MB on back to the system at once.

    By default its heap keeps them, in parts that torch's aligned allocations often cannot use again: with 16 M
    parameters it grew by the whole state, although each piece's was freed (measured). Other C libraries lack the call.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(ctypes.c_int(-3), ctypes.c_int(1 << 20))  # M_MMAP_THRESHOLD


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
