"""The strategies by name."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.errors import InputError, nearest
from unisono.strategy.base import Strategy
from unisono.strategy.fully_sharded import FullyShardedStrategy
from unisono.strategy.replicated import ReplicatedStrategy
from unisono.strategy.sharded import GradientShardedStrategy, OptimizerShardedStrategy

STRATEGIES: Mapping[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (ReplicatedStrategy, OptimizerShardedStrategy, GradientShardedStrategy, FullyShardedStrategy)
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
