"""What holds for the schedule of every epoch on every number of ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.schedule import MicroBatch, Schedule
from unisono.errors import InputError


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    global_batch = draw(st.integers(1, 40))
    return Schedule(
        num_samples=draw(st.integers(0, 300)),
        global_batch=global_batch,
        micro_batch=draw(st.integers(1, global_batch)),
        drop_last=draw(st.booleans()),
    )


world_sizes = st.integers(1, 12)


def _by_rank(schedule: Schedule, world_size: int, first_step: int = 0) -> list[list[MicroBatch]]:
    return [list(schedule.rank_micro_batches(rank, world_size, first_step)) for rank in range(world_size)]


@settings(deadline=None)
@given(schedules(), world_sizes)
def test_every_sample_is_computed_exactly_once(schedule: Schedule, world_size: int) -> None:
    seen: Counter[int] = Counter()
    for micro_batches in _by_rank(schedule, world_size):
        for micro in micro_batches:
            assert micro.num_samples == len(range(micro.start, micro.stop)) > 0
            if not micro.shadow:
                seen.update(range(micro.start, micro.stop))
    kept = schedule.num_samples
    while schedule.drop_last and kept % schedule.global_batch:
        kept -= 1
    assert seen == Counter(range(kept))


@settings(deadline=None)
@given(schedules(), world_sizes)
def test_the_ranks_change_nothing_but_who_computes(schedule: Schedule, world_size: int) -> None:
    def tree(world_size: int) -> Counter[tuple[int, ...]]:
        return Counter(
            (micro.step, micro.index, micro.num_micro, micro.start, micro.stop)
            for micro_batches in _by_rank(schedule, world_size)
            for micro in micro_batches
            if not micro.shadow
        )

    assert tree(world_size) == tree(1)


@settings(deadline=None)
@given(schedules())
def test_steps_and_micro_batches_are_full_but_the_last(schedule: Schedule) -> None:
    micro_batches = list(schedule.rank_micro_batches(0, 1))
    steps = [[micro for micro in micro_batches if micro.step == step] for step in range(schedule.num_steps)]
    assert sum(map(len, steps)) == len(micro_batches)
    for step, micros in enumerate(steps):
        assert [micro.index for micro in micros] == list(range(len(micros)))
        assert {micro.num_micro for micro in micros} == {len(micros)} == {schedule.num_micro(step)}
        assert all(micro.num_samples == schedule.micro_batch for micro in micros[:-1])
        assert 0 < micros[-1].num_samples <= schedule.micro_batch
    sizes = [sum(micro.num_samples for micro in micros) for micros in steps]
    assert all(size == schedule.global_batch for size in (sizes if schedule.drop_last else sizes[:-1]))
    assert all(
        len(micros) == schedule.full_num_micro
        for micros, size in zip(steps, sizes, strict=True)
        if size == schedule.global_batch
    )
    # In the order of their positions, without a gap.
    assert all(before.stop == after.start for before, after in pairwise(micro_batches))


@settings(deadline=None)
@given(schedules(), world_sizes)
def test_blocks_are_contiguous_balanced_and_in_rank_order(schedule: Schedule, world_size: int) -> None:
    for step in range(schedule.num_steps):
        blocks = [schedule.block(step, rank, world_size) for rank in range(world_size)]
        assert [leaf for block in blocks for leaf in block] == list(range(schedule.num_micro(step)))
        lengths = [len(block) for block in blocks]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1


@settings(deadline=None)
@given(schedules(), world_sizes)
def test_strided_ranks_attend_every_round(schedule: Schedule, world_size: int) -> None:
    schedule = replace(schedule, strided=True)
    by_rank = _by_rank(schedule, world_size)
    assert [schedule.num_rank_micro_batches(rank, world_size) for rank in range(world_size)] == list(map(len, by_rank))
    for step in range(schedule.num_steps):
        num_micro, rounds = schedule.num_micro(step), []
        for micros in by_rank:
            rounds.append([micro for micro in micros if micro.step == step])
            assert [micro.is_last for micro in rounds[-1]] == [False] * (len(rounds[-1]) - 1) + [True]
        assert {len(own) for own in rounds} == {-(-num_micro // world_size)}
        dealt = [micro for attended in zip(*rounds, strict=True) for micro in attended]
        assert [micro.index for micro in dealt if not micro.shadow] == list(range(num_micro))
        assert all(micro.index == 0 for micro in dealt if micro.shadow)


@settings(deadline=None)
@given(schedules(), world_sizes)
def test_each_rank_ends_each_step_exactly_once(schedule: Schedule, world_size: int) -> None:
    for rank, micro_batches in enumerate(_by_rank(schedule, world_size)):
        assert [micro.step for micro in micro_batches if micro.is_last] == list(range(schedule.num_steps))
        for step in range(schedule.num_steps):
            micros = [micro for micro in micro_batches if micro.step == step]
            assert [micro.is_last for micro in micros] == [False] * (len(micros) - 1) + [True]
            block = list(schedule.block(step, rank, world_size))
            if block:
                assert [micro.index for micro in micros] == block
                assert not any(micro.shadow for micro in micros)
            else:
                assert [(micro.index, micro.shadow) for micro in micros] == [(0, True)]


@settings(deadline=None)
@given(schedules(), world_sizes)
def test_the_closed_form_counts_right(schedule: Schedule, world_size: int) -> None:
    counted = [len(micro_batches) for micro_batches in _by_rank(schedule, world_size)]
    assert [schedule.num_rank_micro_batches(rank, world_size) for rank in range(world_size)] == counted


@settings(deadline=None)
@given(schedules(), world_sizes, st.data())
def test_a_resume_is_the_tail(schedule: Schedule, world_size: int, data: st.DataObject) -> None:
    first_step = data.draw(st.integers(0, schedule.num_steps))
    for whole, resumed in zip(_by_rank(schedule, world_size), _by_rank(schedule, world_size, first_step), strict=True):
        assert resumed == [micro for micro in whole if micro.step >= first_step]


@settings(deadline=None)
@given(schedules())
def test_a_micro_batch_can_be_looked_up(schedule: Schedule) -> None:
    for micro in schedule.rank_micro_batches(0, 1):
        found = schedule.micro(micro.step, micro.index)
        assert (found.start, found.stop, found.num_micro) == (micro.start, micro.stop, micro.num_micro)
        assert (found.step, found.index) == (micro.step, micro.index)


def test_an_epoch_written_out_by_hand() -> None:
    schedule = Schedule(num_samples=11, global_batch=8, micro_batch=3)
    assert list(schedule.rank_micro_batches(0, 2)) == [
        MicroBatch(step=0, index=0, num_micro=3, start=0, stop=3, is_last=False, shadow=False),
        MicroBatch(step=0, index=1, num_micro=3, start=3, stop=6, is_last=True, shadow=False),
        MicroBatch(step=1, index=0, num_micro=1, start=8, stop=11, is_last=True, shadow=False),
    ]
    assert list(schedule.rank_micro_batches(1, 2)) == [
        MicroBatch(step=0, index=2, num_micro=3, start=6, stop=8, is_last=True, shadow=False),
        MicroBatch(step=1, index=0, num_micro=1, start=8, stop=11, is_last=True, shadow=True),
    ]


def test_nothing_grows_with_the_epoch() -> None:
    schedule = Schedule(num_samples=2**62, global_batch=64, micro_batch=8)
    assert schedule.num_rank_micro_batches(1, 4) == 2**62 // 64 * 2
    tail = schedule.rank_micro_batches(1, 4, first_step=2**55)
    assert [micro.start for micro in islice(tail, 2)] == [2**61 + 16, 2**61 + 24]


def test_drop_last_may_leave_nothing() -> None:
    schedule = Schedule(num_samples=7, global_batch=8, micro_batch=2, drop_last=True)
    assert schedule.num_steps == 0
    assert list(schedule.rank_micro_batches(0, 1)) == []
    assert schedule.num_rank_micro_batches(0, 1) == 0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_samples": -1}, "num_samples must be an integer of at least 0, got -1"),
        ({"num_samples": 1.5}, "num_samples must be an integer of at least 0, got 1.5"),
        ({"global_batch": 0}, "global_batch must be a positive integer, got 0"),
        ({"micro_batch": -2}, "micro_batch must be a positive integer, got -2"),
        ({"micro_batch": True}, "micro_batch must be a positive integer, got True"),
        ({"micro_batch": 9}, "micro_batch=9 does not fit in global_batch=8"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Schedule(**({"num_samples": 100, "global_batch": 8, "micro_batch": 2} | sizes))


def test_questions_about_what_does_not_exist_are_refused() -> None:
    schedule = Schedule(num_samples=11, global_batch=8, micro_batch=3)
    for step in (-1, 2):
        with pytest.raises(IndexError, match=f"step {step} is not in an epoch of 2 steps"):
            schedule.num_micro(step)
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"micro-batch {index} is not in step 0, which has 3"):
            schedule.micro(0, index)
    for rank in (-1, 2):
        # At the call, not at the first item.
        with pytest.raises(InputError, match=f"rank {rank} is not one of world_size=2 ranks"):
            schedule.rank_micro_batches(rank, 2)
        with pytest.raises(InputError, match=f"rank {rank} is not one of world_size=2 ranks"):
            schedule.num_rank_micro_batches(rank, 2)
    with pytest.raises(InputError, match="world_size must be a positive integer, got 0"):
        schedule.block(0, 0, 0)
    for first_step in (-1, 3):
        with pytest.raises(InputError, match=f"first_step={first_step} is not in an epoch of 2 steps"):
            schedule.rank_micro_batches(0, 1, first_step)
