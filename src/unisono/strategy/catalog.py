"""The strategies by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unisono.errors import InputError, nearest, require_positive_int
from unisono.execution import Execution
from unisono.launch.environment import Place, usable_cores
from unisono.strategy.base import Strategy
from unisono.strategy.fully_sharded import FullyShardedStrategy, HybridShardedStrategy
from unisono.strategy.offload import Offload
from unisono.strategy.replicated import ReplicatedStrategy
from unisono.strategy.sharded import GradientShardedStrategy, OptimizerShardedStrategy
from unisono.strategy.team import Team, default_shard_size
from unisono.strategy.threaded import ThreadedStrategy

STRATEGIES: Mapping[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        ReplicatedStrategy,
        OptimizerShardedStrategy,
        GradientShardedStrategy,
        FullyShardedStrategy,
        HybridShardedStrategy,
        ThreadedStrategy,
    )
}
# Chosen for the memory of a rank, more than for its time.
SAVE_MEMORY = {s.name for s in (GradientShardedStrategy, FullyShardedStrategy, HybridShardedStrategy)}
_ALIASES = {"fsdp": "zero3"}


def strategy_name(name: str) -> str:
    """Returns the one name of a strategy that may have several.

    Raises:
        InputError: there is none of that name.
    """
    if _ALIASES.get(name, name) not in STRATEGIES:
        known = f"{', '.join(STRATEGIES)} or fsdp{nearest(name, [*STRATEGIES, *_ALIASES])}"
        raise InputError(f"there is no strategy '{name}': take {known}")
    return _ALIASES.get(name, name)


def strategy_options(how: Execution, place: Place) -> dict[str, Any]:
    """Returns what a strategy is made with, beside what all are: arguments of `Setup`.

    Args:
        how: What the user asked for; its strategy by its one name.
        place: Of this rank.

    Raises:
        InputError: the strategy has no shard size, the world cannot be cut into teams of it, there is nowhere to
            offload to, or there are several processes where one is meant.
    """
    options: dict[str, Any] = {}
    if how.strategy == ThreadedStrategy.name:
        if place.world_size > 1:
            raise InputError(
                f"dp is one process with several devices or threads, and this is one of {place.world_size} processes: "
                "give --strategy dp to unisono's own command, whose --nproc then counts them, or choose ddp"
            )
        options["workers"], options["devices"] = _workers(how.workers)
    elif how.workers is not None:
        raise InputError(f"workers is for the strategy dp, and this is {how.strategy}")
    if how.offload is not None:
        options["offload"] = Offload(how.offload, None if how.offload_dir is None else Path(how.offload_dir))
    elif how.offload_dir is not None:
        raise InputError("offload_dir is for offload disk: give that too")
    if how.strategy != HybridShardedStrategy.name:
        if how.shard_size is not None:
            raise InputError(f"shard_size is for the strategy hsdp, and this is {how.strategy}")
        return options
    size = how.shard_size
    if size is None:
        size = default_shard_size(place.world_size, place.local_world_size)
    return {**options, "shard_size": Team(0, place.world_size, require_positive_int(size, "shard_size")).shard_size}


def _workers(count: int | None) -> tuple[int, list[torch.device]]:
    """Returns how many devices or threads share the work, and the devices if each has its own."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = usable_cores() if accelerator is None else torch.accelerator.device_count()
    count = there if count is None else require_positive_int(count, "workers")
    if accelerator is None:
        return count, []
    if count > there:
        raise InputError(f"dp on {count} devices, and there are {there}")
    return count, [torch.device(accelerator.type, index) for index in range(count)]
