"""Team: which ranks keep one copy of the weights together, and which keep the same part of it."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import InputError


@dataclass(frozen=True)
class Team:
    """Neighbouring ranks, `shard_size` of them, share one copy: ranks of one host, where hosts have as many.

    With a shard size of 1 every rank keeps all weights (zero1, zero2), with the world size nobody keeps more than a
    part (zero3); between the two copies are spread over teams (hsdp).

    Attributes:
        rank: Whose team.
        world_size: All ranks.
        shard_size: Ranks of a team.

    Raises:
        InputError: the world cannot be cut into such teams.
    """

    rank: int
    world_size: int
    shard_size: int

    def __post_init__(self) -> None:
        if self.shard_size < 1 or self.world_size % self.shard_size:
            raise InputError(
                f"shard_size {self.shard_size} does not divide the {self.world_size} processes: choose one that does"
            )

    @property
    def members(self) -> range:
        """The ranks that have one copy together."""
        first = self.rank - self.rank % self.shard_size
        return range(first, first + self.shard_size)

    def peers(self, rank: int) -> range:
        """The ranks that keep the same part as `rank`."""
        return range(rank % self.shard_size, self.world_size, self.shard_size)

    def run_of(self, rank: int) -> int:
        """Which of `world_size` runs of a bucket `rank` owns: those of peers are neighbours."""
        return rank % self.shard_size * (self.world_size // self.shard_size) + rank // self.shard_size


def default_shard_size(world_size: int, local_world_size: int) -> int:
    """The ranks of a host where there are several hosts, else the smallest team of more than one."""
    if local_world_size < world_size and world_size % local_world_size == 0 and local_world_size > 1:
        return local_world_size
    return next((size for size in range(2, world_size + 1) if world_size % size == 0), 1)
