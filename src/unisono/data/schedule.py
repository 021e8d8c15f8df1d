"""Who computes which micro-batch: steps, micro-batches and ranks as arithmetic.

The micro-batches of a step and their places in the gradient tree depend on the recipe alone. Only
`Schedule.block` knows ranks, and it says no more than who computes what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from unisono.errors import InputError, require_positive_int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The fixed unit of forward and backward: positions [start, stop) of an epoch.

    Attributes:
        step: The step within its epoch.
        index: The micro-batch within the step, from 0: its leaf in the gradient tree.
        num_micro: The leaves of this step's tree.
        start: The first position in the epoch.
        stop: One past the last position.
        is_last: This rank's last micro-batch of the step: the next `optimizer.step()` is collective.
        shadow: Computed only to keep an otherwise idle rank in step; left out of every sum.
    """

    step: int
    index: int
    num_micro: int
    start: int
    stop: int
    is_last: bool = False
    shadow: bool = False

    @property
    def leaf(self) -> int | None:
        """Its leaf in the gradient tree, None for a shadow."""
        return None if self.shadow else self.index

    @property
    def num_samples(self) -> int:
        """Samples of this micro-batch."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps and micro-batches of one epoch.

    Step s takes positions [s * global_batch, (s + 1) * global_batch), and micro-batch m of it the m-th
    `micro_batch` of these; the last of each may be short.

    Attributes:
        num_samples: Samples of an epoch.
        global_batch: Samples of a step.
        micro_batch: Samples of a micro-batch.
        drop_last: Leave out a last step that would be short.
        strided: Deal micro-batches out in rounds of one a rank, all of which every rank attends, instead of giving each
            rank neighbouring ones.

    Raises:
        InputError: A size is not a positive integer, or `micro_batch` exceeds `global_batch`.
    """

    num_samples: int
    global_batch: int
    micro_batch: int
    drop_last: bool = False
    strided: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.num_samples, bool) or not isinstance(self.num_samples, int) or self.num_samples < 0:
            raise InputError(f"num_samples must be an integer of at least 0, got {self.num_samples!r} (Schedule)")
        require_positive_int(self.global_batch, "global_batch", "Schedule")
        require_positive_int(self.micro_batch, "micro_batch", "Schedule")
        if self.micro_batch > self.global_batch:
            raise InputError(
                f"micro_batch={self.micro_batch} does not fit in global_batch={self.global_batch} (Schedule); "
                "make micro_batch smaller or global_batch larger"
            )

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return self.num_samples // self.global_batch + (self._short_step_samples > 0)

    @property
    def full_num_micro(self) -> int:
        """Micro-batches of a full step."""
        return -(-self.global_batch // self.micro_batch)

    def num_micro(self, step: int) -> int:
        """Returns the micro-batches of `step`, at least 1.

        Raises:
            IndexError: The epoch has no such step.
        """
        start, stop = self._span(step)
        return -(-(stop - start) // self.micro_batch)

    def micro(self, step: int, index: int) -> MicroBatch:
        """Returns micro-batch `index` of `step`, whoever computes it.

        Raises:
            IndexError: The epoch has no such step, or the step no such micro-batch.
        """
        num_micro = self.num_micro(step)
        if not 0 <= index < num_micro:
            raise IndexError(f"micro-batch {index} is not in step {step}, which has {num_micro}, counted from 0")
        return self._micro(step, index)

    def block(self, step: int, rank: int, world_size: int) -> range:
        """Returns the micro-batches of `step` that `rank` computes, perhaps none.

        Sizes of blocks differ by at most 1, larger ones first. Blocks follow each other in rank order, or, strided,
        rank r has every `world_size`-th micro-batch from the r-th on.

        Raises:
            IndexError: The epoch has no such step.
            InputError: `rank` is not one of `world_size` ranks.
        """
        _check_rank(rank, world_size)
        return self.blocks(step, world_size)[rank]

    def blocks(self, step: int, world_size: int) -> tuple[range, ...]:
        """Returns the block of every rank."""
        return _blocks(self.num_micro(step), world_size, self.strided)

    def step_size(self, step: int) -> int:
        """Returns the samples of `step`."""
        start, stop = self._span(step)
        return stop - start

    def max_block(self, step: int, world_size: int) -> int:
        """Returns the size of the largest block of `step`: the rounds that every rank must attend.

        Raises:
            IndexError: The epoch has no such step.
            InputError: `world_size` is not a positive integer.
        """
        return len(self.block(step, 0, world_size))

    def rank_micro_batches(self, rank: int, world_size: int, first_step: int = 0) -> Iterator[MicroBatch]:
        """Yields, one at a time, what `rank` computes from `first_step` to the end of the epoch.

        A rank with an empty block in a step, or strided with nothing to do in its last round, gets a shadow,
        micro-batch 0 of that step, so that every rank meets every collective and user code never an empty batch.

        Raises:
            InputError: `rank` is not one of `world_size` ranks, or `first_step` lies beyond the epoch.
        """
        _check_rank(rank, world_size)
        if not 0 <= first_step <= self.num_steps:
            raise InputError(
                f"first_step={first_step} is not in an epoch of {self.num_steps} steps (Schedule); "
                "resume with the data set, global_batch and drop_last that the run was started with"
            )
        return self._rank_micro_batches(rank, world_size, first_step)

    def num_rank_micro_batches(self, rank: int, world_size: int) -> int:
        """Returns how many micro-batches `rank` computes in an epoch, shadows included, without counting.

        Raises:
            InputError: `rank` is not one of `world_size` ranks.
        """
        _check_rank(rank, world_size)
        total = self.num_samples // self.global_batch * self._num_attended(self.full_num_micro, rank, world_size)
        if self._short_step_samples:
            total += self._num_attended(self.num_micro(self.num_steps - 1), rank, world_size)
        return total

    def _num_attended(self, num_micro: int, rank: int, world_size: int) -> int:
        blocks = _blocks(num_micro, world_size, self.strided)
        return len(blocks[0] if self.strided else blocks[rank]) or 1

    @property
    def _short_step_samples(self) -> int:
        return 0 if self.drop_last else self.num_samples % self.global_batch

    def _span(self, step: int) -> tuple[int, int]:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is not in an epoch of {self.num_steps} steps, counted from 0")
        start = step * self.global_batch
        return start, min(start + self.global_batch, self.num_samples)

    def _micro(self, step: int, index: int, is_last: bool = False, shadow: bool = False) -> MicroBatch:
        step_start, step_stop = self._span(step)
        start = step_start + index * self.micro_batch
        stop = min(start + self.micro_batch, step_stop)
        return MicroBatch(step, index, self.num_micro(step), start, stop, is_last, shadow)

    def _rank_micro_batches(self, rank: int, world_size: int, first_step: int) -> Iterator[MicroBatch]:
        for step in range(first_step, self.num_steps):
            block = self.blocks(step, world_size)[rank]
            count = self._num_attended(self.num_micro(step), rank, world_size)
            for number, index in enumerate(block, start=1):
                yield self._micro(step, index, is_last=number == count)
            if len(block) < count:
                yield self._micro(step, 0, is_last=True, shadow=True)


@lru_cache(maxsize=64)
def _blocks(num_micro: int, world_size: int, strided: bool) -> tuple[range, ...]:
    if strided:
        return tuple(range(rank, num_micro, world_size) for rank in range(world_size))
    size, larger = divmod(num_micro, world_size)
    starts = [rank * size + min(rank, larger) for rank in range(world_size + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def _check_rank(rank: int, world_size: int) -> None:
    require_positive_int(world_size, "world_size", "Schedule")
    if not 0 <= rank < world_size:
        raise InputError(f"rank {rank} is not one of world_size={world_size} ranks (Schedule), counted from 0")
