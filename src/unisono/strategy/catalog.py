"""The strategies by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.errors import InputError, nearest, require_positive_int
from unisono.execution import Execution
from unisono.launch.environment import Place
from unisono.strategy.base import Strategy
from unisono.strategy.fully_sharded import FullyShardedStrategy, HybridShardedStrategy
from unisono.strategy.offload import Offload
from unisono.strategy.replicated import ReplicatedStrategy
from unisono.strategy.sharded import GradientShardedStrategy, OptimizerShardedStrategy
from unisono.strategy.team import Team, default_shard_size

STRATEGIES: Mapping[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        ReplicatedStrategy,
        OptimizerShardedStrategy,
        GradientShardedStrategy,
        FullyShardedStrategy,
        HybridShardedStrategy,
    )
}
_ALIASES = {"fsdp": "zero3"}


def strategy_name(name: str) -> str:
    """Returns the one name of a strategy that may have several.

    Raises:
        InputError: there is none of that name.
    """
    if _ALIASES.get(name, name) not in STRATEGIES:
        known = nearest(name, [*STRATEGIES, *_ALIASES]) or f"; there is {', '.join(STRATEGIES)}"
        raise InputError(f"there is no strategy '{name}'{known}")
    return _ALIASES.get(name, name)


def strategy_options(how: Execution, place: Place) -> dict[str, Any]:
    """Returns what a strategy is made with, beside what all are: arguments of `Setup`.

    Args:
        how: What the user asked for; its strategy by its one name.
        place: Of this rank.

    Raises:
        InputError: the strategy has no shard size, the world cannot be cut into teams of it, or there is nowhere to
            offload to.
    """
    options: dict[str, Any] = {}
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
