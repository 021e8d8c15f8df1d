"""The strategies by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.errors import InputError, nearest, require_positive_int
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


def strategy_options(name: str, place: Place, shard_size: int | None, offload: Offload | None) -> dict[str, Any]:
    """Returns what a strategy is made with, beside what all are.

    Args:
        name: Of the strategy.
        place: Of this rank.
        shard_size: What the user asked for.
        offload: Where the optimizer's state goes.

    Raises:
        InputError: the strategy has no shard size, or the world cannot be cut into teams of it.
    """
    options: dict[str, Any] = {} if offload is None else {"offload": offload}
    if name != HybridShardedStrategy.name:
        if shard_size is not None:
            raise InputError(f"shard_size is for the strategy hsdp, and this is {name}")
        return options
    size = default_shard_size(place.world_size, place.local_world_size) if shard_size is None else shard_size
    return {**options, "shard_size": Team(0, place.world_size, require_positive_int(size, "shard_size")).shard_size}
