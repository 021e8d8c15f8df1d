"""FileLayout: where each tensor of a safetensors file lies, worked out from names and shapes alone.

So all ranks agree on every offset without a word, and each writes what it has straight into the one file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch

from unisono.errors import InputError
from unisono.numerics.digest import SAFETENSORS_DTYPES

FORMAT = 1
MODEL, OPTIMIZER, TRACKED, STATE = "model.safetensors", "optimizer.safetensors", "tracked.safetensors", "state.json"
# The unit of checksums: small enough to name the bad tensor, large enough that a thousand cover a gigabyte.
BLOCK_BYTES = 1024 * 1024
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_CRC_POLYNOMIAL = 0xEDB88320


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file, as anyone sees it who knows the model.

    Attributes:
        name: Unique in its file.
        dtype: One that safetensors can hold.
        shape: As torch has it; the file holds the elements in row-major order.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Entry:
        """Describes a tensor.

        Raises:
            InputError: safetensors cannot hold it.
        """
        if tensor.dtype not in SAFETENSORS_DTYPES or tensor.layout is not torch.strided:
            kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout
            raise InputError(f"{name} is {kind}, which a checkpoint cannot hold: keep it in another form")
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """See the module's docstring.

    Attributes:
        entries: In the order of the file: wide types first, so that all are aligned, then by name.
        header: What the file begins with: its length as 8 bytes, little-endian, and JSON.
        starts: The byte at which each entry begins, by name.
        num_bytes: Of the whole file.
    """

    entries: tuple[Entry, ...]
    header: bytes
    starts: Mapping[str, int]
    num_bytes: int

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> FileLayout:
        """Lays out the entries."""
        ordered = tuple(sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name)))
        bounds = list(accumulate((entry.num_bytes for entry in ordered), initial=0))
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for entry, offsets in zip(ordered, pairwise(bounds), strict=True):
            kind = {"dtype": SAFETENSORS_DTYPES[entry.dtype], "shape": entry.shape}
            table[entry.name] = {**kind, "data_offsets": offsets}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        starts = {entry.name: len(header) + offset for entry, offset in zip(ordered, bounds, strict=False)}
        return cls(ordered, header, starts, len(header) + bounds[-1])

    @classmethod
    def read(cls, start: bytes) -> FileLayout:
        """Reads the layout of a file whose first bytes are `start`; of any writer.

        Raises:
            ValueError: it is no safetensors file.
        """
        length = int.from_bytes(start[:8], "little")
        table = json.loads(start[8 : 8 + length])
        entries, starts, stop = [], {}, 0
        for name, place in table.items():
            if name != "__metadata__":
                entry = Entry(name, _DTYPES[place["dtype"]], tuple(place["shape"]))
                first, last = place["data_offsets"]
                if last - first != entry.num_bytes:
                    raise ValueError(f"{name} has {last - first} bytes, and its shape needs {entry.num_bytes}")
                entries.append(entry)
                starts[name], stop = 8 + length + first, max(stop, last)
        return cls(tuple(entries), start[: 8 + length], starts, 8 + length + stop)

    def named(self, start: int, stop: int) -> str:
        """Names what lies in a range of bytes, for messages."""
        inside = [e for e in self.entries if self.starts[e.name] < stop and self.starts[e.name] + e.num_bytes > start]
        names = [entry.name for entry in sorted(inside, key=lambda entry: self.starts[entry.name])]
        found = ["the header"] if start < len(self.header) else []
        if names:
            found.append(f"tensor {names[0]}" if len(names) == 1 else f"one of the tensors {names[0]} to {names[-1]}")
        return " or ".join(found)


def joined_crc(one: int, other: int, length: int) -> int:
    """Returns the CRC-32 of two pieces of data, one after the other, given those of each.

    Args:
        length: Bytes of the second piece.

    The first one's remainder is multiplied by x^(8 * length) modulo the CRC's polynomial (zlib's `crc32_combine`).
    """
    return _product(_power(length), one) ^ other


def _product(one: int, other: int) -> int:
    """The product of two polynomials over GF(2), bits reversed as CRC-32 has them, modulo its own."""
    found = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            found ^= other
        other = (other >> 1) ^ (_CRC_POLYNOMIAL if other & 1 else 0)
    return found


@lru_cache(maxsize=4096)
def _power(length: int) -> int:
    """x^(8 * length)."""
    found, square = 1 << 31, 1 << 23  # x^0 and x^8
    while length:
        if length & 1:
            found = _product(square, found)
        square, length = _product(square, square), length >> 1
    return found
