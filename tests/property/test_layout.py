"""What holds for the flat layout of every list of parameters."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import ThreadCollectives, ThreadWorld
from unisono.numerics.layout import FlatLayout
from unisono.strategy.base import Setup, StepPlan
from unisono.strategy.flat import FlatGroup
from unisono.strategy.replicated import ReplicatedStrategy

sizes = st.lists(st.integers(0, 200) | st.integers(16_000, 70_000), min_size=1, max_size=12)
bucket_sizes = st.integers(1, 60_000)
BLOCK = 1_024  # elements of a block, as documented
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def layout_of(numels: list[int]) -> FlatLayout:
    return FlatLayout.of([(f"p{number}", numel) for number, numel in enumerate(numels)])


def covered(total: int, parts: list[range]) -> np.ndarray:
    """How often each element lies in a part."""
    counts = np.zeros(total, dtype=int)
    for part in parts:
        assert 0 <= part.start <= part.stop <= total
        counts[part.start : part.stop] += 1
    return counts


@settings(deadline=None)
@given(sizes)
def test_segments_are_runs_of_blocks_and_do_not_overlap(numels: list[int]) -> None:
    layout = layout_of(numels)
    assert [segment.numel for segment in layout.segments] == numels
    assert [segment.name for segment in layout.segments] == [f"p{number}" for number in range(len(numels))]
    for segment in layout.segments:
        assert segment.offset % BLOCK == 0
        assert 0 <= segment.padded - segment.numel < BLOCK
        assert segment.stop - segment.offset == segment.padded
    assert (covered(layout.total, [range(s.offset, s.stop) for s in layout.segments]) == 1).all()


@settings(deadline=None)
@given(sizes, bucket_sizes, st.integers(1, 9))
def test_buckets_and_shards_tile_the_vector_with_whole_blocks(
    numels: list[int], bucket_elements: int, world_size: int
) -> None:
    layout = layout_of(numels)
    buckets = layout.buckets(bucket_elements)
    assert (covered(layout.total, buckets) == 1).all()
    assert all(map(len, buckets))
    all_shards, owners = [], np.full(layout.total, -1)
    for bucket in buckets:
        shards = layout.shards(bucket, world_size)
        assert len(shards) == world_size
        for shard in shards:
            assert bucket.start <= shard.start <= shard.stop <= bucket.stop
            owners[shard.start : shard.stop] = len(all_shards)
            all_shards.append(shard)
        # No rank has much more to do than the others.
        assert max(map(len, shards)) <= len(bucket) / world_size + BLOCK
    assert (covered(layout.total, all_shards) == 1).all()
    # A block has one owner, whatever the world size, and the blocks of the shards are all blocks, each once.
    for start in range(0, layout.total, BLOCK):
        assert len(set(owners[start : start + BLOCK].tolist())) == 1
    blocks = [index for shard in all_shards for index in layout.blocks_in(shard)]
    assert blocks == list(range(layout.num_blocks))
    assert layout.num_blocks == len(range(0, layout.total, BLOCK))


@settings(deadline=None)
@given(sizes, bucket_sizes)
def test_buckets_are_about_as_large_as_asked(numels: list[int], bucket_elements: int) -> None:
    layout = layout_of(numels)
    buckets = layout.buckets(bucket_elements)
    for bucket in buckets[:-1]:
        assert abs(len(bucket) - bucket_elements) < BLOCK or len(bucket) == BLOCK
    assert len({len(bucket) for bucket in buckets[:-1]}) <= 1


@settings(deadline=None)
@given(sizes, st.integers(1, 9))
def test_owners_get_whole_parameters(numels: list[int], world_size: int) -> None:
    layout = layout_of(numels)
    owned = layout.owned(world_size)
    assert len(owned) == world_size
    assert (covered(layout.total, owned) == 1).all()
    for segment in filter(lambda segment: segment.numel, layout.segments):
        assert sum(segment.offset in part and segment.stop - 1 in part for part in owned) == 1
    # As even as whole parameters allow.
    assert max(map(len, owned)) <= layout.total / world_size + max(segment.padded for segment in layout.segments)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=8),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
)
def test_values_survive_the_way_through_the_views(shapes: list[list[int]], dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    params = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    params = [p.to(memory_format=torch.channels_last) if p.dim() == 4 else p for p in params]
    params += [torch.zeros(4, 3, dtype=dtype).t(), torch.zeros(2, 3, 2, 2, 2, dtype=dtype)]
    params[-1] = params[-1].to(memory_format=torch.channels_last_3d)
    group = FlatGroup([(f"p{number}", param) for number, param in enumerate(params)])
    buffer = group.buffer()
    values = [torch.randn(param.shape, generator=generator, dtype=dtype) for param in params]
    views = [buffer.views[position] for position in range(len(params))]
    for view, value in zip(views, values, strict=True):
        view.copy_(value)
    for view, value, param in zip(views, values, params, strict=True):
        assert view.shape == param.shape
        assert torch.equal(view, value)
        assert view.untyped_storage().data_ptr() == buffer.flat.untyped_storage().data_ptr()
        if param.dim() == 4 and param.is_contiguous(memory_format=torch.channels_last):
            assert view.stride() == param.stride()  # a copy of a gradient is then linear
    # Each value once, and nothing but zeros between them.
    found = torch.view_as_real(buffer.flat) if dtype.is_complex else buffer.flat
    wanted = torch.cat([value.reshape(-1) for value in values])
    wanted = torch.view_as_real(wanted) if dtype.is_complex else wanted
    assert sorted(found[found != 0].tolist()) == sorted(wanted[wanted != 0].tolist())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=8), st.integers(1, 4000), st.integers(0, 2000))
def test_offsets_do_not_depend_on_the_world_size(numels: list[int], bucket_bytes: int, one_shot_bytes: int) -> None:
    found = []
    for world_size in (1, 2, 3, 7):
        for rank in (0, world_size - 1):
            params = [torch.nn.Parameter(torch.zeros(numel)) for numel in numels]
            optimizer = torch.optim.SGD(params, lr=0.1)
            names = {id(param): f"p{number}" for number, param in enumerate(params)}
            comm = ThreadCollectives(ThreadWorld(world_size), rank)
            sizes = {"bucket_bytes": bucket_bytes, "one_shot_bytes": one_shot_bytes}
            strategy = ReplicatedStrategy(Setup(comm=comm, optimizer=optimizer, names=names, **sizes))
            strategy.begin_step(StepPlan(8, (range(8),) * world_size))
            found.append([(group.layout.segments, group.layout.total, group.buckets) for group in strategy.groups])
    assert all(layouts == found[0] for layouts in found)
    assert sorted(segment.name for segment in found[0][0][0]) == sorted(f"p{n}" for n in range(len(numels)))
