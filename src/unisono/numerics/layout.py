"""FlatLayout: where each parameter lives in the one flat vector that is reduced, sharded and measured.

The vector is cut into *blocks* of a fixed size, and every parameter is a *segment*: a run of whole blocks, its end
padded with zeros. So offsets do not depend on the world size; buckets (the unit of one exchange) and shards (what
one rank owns of a bucket) are runs of whole blocks too; no element is ever in the scalar tail of a vectorised kernel
(fused optimizers round their tails differently: measured, torch 2.13 on CPU); a shard may hold whole parameters where
an optimizer needs them; and norms are summed block by block, so no boundary can show in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ALIGN_BYTES = 64
# 4 KB of float32. The padding costs half a block a parameter: 0.1 MB in 200 parameters of a GPT.
BLOCK_ELEMENTS = 1_024


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's place. All figures are in elements.

    Attributes:
        name: The parameter's own name.
        offset: Where it starts: at a block.
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
    def of(cls, sizes: Sequence[tuple[str, int]]) -> FlatLayout:
        """Lays out parameters of the given (name, numel)."""
        segments, offset = [], 0
        for name, numel in sizes:
            padded = -(-numel // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
            segments.append(Segment(name, offset, numel, padded))
            offset += padded
        return cls(tuple(segments), offset)

    @property
    def num_blocks(self) -> int:
        """Blocks of the vector."""
        return self.total // BLOCK_ELEMENTS

    def buckets(self, bucket_elements: int) -> list[range]:
        """Cuts the vector into runs of whole blocks of about `bucket_elements`; the last may be shorter."""
        size = max(1, bucket_elements // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
        return [range(start, min(start + size, self.total)) for start in range(0, self.total, size)]

    def segment_buckets(self, bucket_elements: int) -> list[range]:
        """Cuts the vector into runs of whole segments of about `bucket_elements`; a larger segment is one by itself."""
        buckets, start = [], 0
        for segment in self.segments:
            if segment.stop - start > bucket_elements and segment.offset > start:
                buckets.append(range(start, segment.offset))
                start = segment.offset
        return [*buckets, range(start, self.total)] if start < self.total else buckets

    def shards(self, bucket: range, world_size: int) -> list[range]:
        """Cuts a bucket into `world_size` runs of whole blocks, as even as blocks allow; some may be empty."""
        count = len(bucket) // BLOCK_ELEMENTS
        bounds = [bucket.start + BLOCK_ELEMENTS * (count * rank // world_size) for rank in range(world_size)]
        return [range(start, stop) for start, stop in pairwise([*bounds, bucket.stop])]

    def owned(self, world_size: int) -> list[range]:
        """Cuts the vector into `world_size` runs of whole segments, as even as these allow; some may be empty."""
        starts = [segment.offset for segment in self.segments] + [self.total]
        bounds = [min(starts, key=lambda start: abs(start - self.total * r // world_size)) for r in range(world_size)]
        return [range(start, stop) for start, stop in pairwise([*bounds, self.total])]

    @staticmethod
    def blocks_in(part: range) -> range:
        """Returns the indices of the blocks inside a bucket or shard."""
        return range(part.start // BLOCK_ELEMENTS, part.stop // BLOCK_ELEMENTS)
