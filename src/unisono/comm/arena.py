"""Arena: memory of this process that other processes of the host can map.

In files that have no name (memfd), which peers open by way of /proc: so nothing can be left behind, in /dev/shm or
elsewhere, whatever ends the processes, and a small /dev/shm (64 MB in a container) does not matter.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

import torch

_CHUNK_BYTES = 4 * 1024 * 1024
_PAGE = mmap.PAGESIZE


def make_file(num_bytes: int) -> tuple[int, mmap.mmap]:
    """Makes a file without a name, all of whose memory is there.

    Raises:
        OSError: the system has no such files, or no memory.
    """
    file = os.memfd_create("unisono", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, num_bytes)  # or a write, later, would end in a signal
        return file, mmap.mmap(file, num_bytes)
    except BaseException:
        os.close(file)
        raise


def map_file(pid: int, file: int) -> mmap.mmap:
    """Maps the file that another process knows by the descriptor `file`.

    Raises:
        OSError: it is not to be seen from here.
    """
    mine = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(mine, os.fstat(mine).st_size)
    finally:
        os.close(mine)


def bytes_of(memory: mmap.mmap) -> torch.Tensor:
    """All of a file as uint8."""
    return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass(frozen=True)
class _Chunk:
    file: int
    start: int  # address
    memory: memoryview


class Arena:
    """Gives out memory, and takes it back when the tensor that had it is gone."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []  # by address
        self._starts: list[int] = []
        self._filling: _Chunk | None = None
        self._filled = 0
        self._free: dict[int, list[tuple[_Chunk, int]]] = defaultdict(list)
        self._refs: dict[int, weakref.ref[memoryview]] = {}
        self._owner = os.getpid()

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Returns memory with anything in it, as uint8.

        Raises:
            OSError: the system has no more.
        """
        size = max(1, -(-num_bytes // _PAGE)) * _PAGE
        chunk, offset = self._free[size].pop() if self._free[size] else self._cut(size)
        memory = chunk.memory[offset : offset + size]

        def give_back(_: object, key: int = id(memory)) -> None:
            self._refs.pop(key, None)
            self._free[size].append((chunk, offset))

        self._refs[id(memory)] = weakref.ref(memory, give_back)
        return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]

    def _cut(self, size: int) -> tuple[_Chunk, int]:
        if self._filling is None or self._filled + size > len(self._filling.memory):
            file, memory = make_file(max(size, _CHUNK_BYTES))
            chunk = _Chunk(file, bytes_of(memory).data_ptr(), memoryview(memory))
            place = bisect_right(self._starts, chunk.start)
            self._chunks.insert(place, chunk)
            self._starts.insert(place, chunk.start)
            self._filling, self._filled = chunk, 0
        offset, self._filled = self._filled, self._filled + size
        return self._filling, offset

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Returns the file and the offset in it, in bytes, where `tensor` begins; None if it lies elsewhere."""
        address = tensor.data_ptr()
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        chunk = self._chunks[place]
        offset = address - chunk.start
        return (chunk.file, offset) if offset < len(chunk.memory) else None

    def close(self) -> None:
        """Closes the files; the memory stays until the last tensor in it is gone."""
        if os.getpid() == self._owner:
            for chunk in self._chunks:
                os.close(chunk.file)
        self._chunks, self._starts, self._filling = [], [], None
        self._free.clear()
        self._refs.clear()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's bytes, in the order of its memory."""
    if tensor.dim() != 1:
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)
