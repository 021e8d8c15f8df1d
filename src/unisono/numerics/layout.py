"""FlatLayout: where each parameter lives in the one flat vector that is reduced, sharded and measured.

Every parameter is a *segment*: it starts at a multiple of 64 bytes and is padded to one, so offsets do not
depend on the world size, shard boundaries fall on whole SIMD vectors, and no element is ever in the scalar
tail of a vectorised kernel (`torch.optim.AdamW(fused=True)` rounds its tail differently: measured,
torch 2.13 on CPU). A segment is cut into *blocks*; a shard is a run of whole blocks, and norms are summed
block by block, so a shard boundary cannot show in them. *Buckets* are runs of whole segments, the unit of
one exchange.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

ALIGN_BYTES = 64
BLOCK_ELEMENTS = 16_384


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's place. All figures are in elements.

    Attributes:
        name: The parameter's own name.
        offset: Where it starts; a multiple of 64 bytes.
        numel: Elements of the parameter.
        padded: Elements with the padding, to the next segment's start.
    """

    name: str
    offset: int
    numel: int
    padded: int

    @property
    def stop(self) -> int:
        return self.offset + self.padded


@dataclass(frozen=True)
class FlatLayout:
    """The flat vector of a list of parameters.

    Attributes:
        segments: In the order of the vector.
        total: Elements of the vector, padding included.
    """

    segments: tuple[Segment, ...]
    total: int

    @classmethod
    def of(cls, sizes: Sequence[tuple[str, int]], itemsize: int) -> FlatLayout:
        """Lays out parameters of the given (name, numel), each of `itemsize` bytes an element."""
        align = max(1, ALIGN_BYTES // itemsize)
        segments, offset = [], 0
        for name, numel in sizes:
            padded = -(-numel // align) * align
            segments.append(Segment(name, offset, numel, padded))
            offset += padded
        return cls(tuple(segments), offset)

    @cached_property
    def blocks(self) -> tuple[range, ...]:
        """The blocks of every segment, in order: each at most `BLOCK_ELEMENTS` long, none across segments."""
        return tuple(
            range(start, min(start + BLOCK_ELEMENTS, segment.stop))
            for segment in self.segments
            for start in range(segment.offset, segment.stop, BLOCK_ELEMENTS)
        )

    def buckets(self, bucket_elements: int) -> list[range]:
        """Groups whole segments into runs of at least `bucket_elements` (the last may be shorter)."""
        found, start = [], 0
        for segment in self.segments:
            if segment.stop - start >= bucket_elements:
                found.append(range(start, segment.stop))
                start = segment.stop
        if start < self.total:
            found.append(range(start, self.total))
        return found

    def blocks_in(self, part: range) -> range:
        """Returns the indices of the blocks inside `part`, whose ends are block boundaries."""
        starts = self._block_starts
        return range(bisect_left(starts, part.start), bisect_left(starts, part.stop))

    def shards(self, bucket: range, world_size: int) -> list[range]:
        """Cuts a bucket into `world_size` runs of whole blocks, as even as blocks allow; some may be empty."""
        blocks = [self.blocks[index] for index in self.blocks_in(bucket)]
        bounds, position = [bucket.start], 0
        for rank in range(1, world_size):
            target = bucket.start + len(bucket) * rank // world_size
            while position < len(blocks) and (blocks[position].start + blocks[position].stop) // 2 < target:
                position += 1
            bounds.append(blocks[position].start if position < len(blocks) else bucket.stop)
        bounds.append(bucket.stop)
        return [range(start, stop) for start, stop in pairwise(bounds)]

    @cached_property
    def _block_starts(self) -> list[int]:
        return [block.start for block in self.blocks]
