"""Strategies by name."""

from __future__ import annotations

import pytest

from unisono.errors import InputError
from unisono.execution import Execution
from unisono.launch.environment import Place
from unisono.strategy.catalog import STRATEGIES, strategy_name, strategy_options
from unisono.strategy.team import Team


def test_every_strategy_has_a_name_and_fsdp_is_another_of_zero3() -> None:
    assert list(STRATEGIES) == ["ddp", "zero1", "zero2", "zero3", "hsdp", "dp"]
    assert [strategy_name(name) for name in STRATEGIES] == list(STRATEGIES)
    assert strategy_name("fsdp") == "zero3"


@pytest.mark.parametrize(("name", "hint"), [("zero4", "zero3"), ("fdsp", "fsdp"), ("none", "take ddp, zero1")])
def test_a_name_that_is_none_is_refused_with_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        strategy_name(name)


def host(world_size: int) -> Place:
    return Place(0, world_size, 0, world_size)


def test_a_shard_size_is_for_hsdp_and_divides_the_world() -> None:
    assert strategy_options(Execution(strategy="zero3"), host(4)) == {}
    assert strategy_options(Execution(strategy="hsdp", shard_size=2), host(4)) == {"shard_size": 2}
    with pytest.raises(InputError, match="shard_size is for the strategy hsdp, and this is zero1"):
        strategy_options(Execution(strategy="zero1", shard_size=2), host(4))
    for size in (3, 0):
        with pytest.raises(InputError, match="shard_size"):
            strategy_options(Execution(strategy="hsdp", shard_size=size), host(4))


@pytest.mark.parametrize(
    ("world_size", "local", "size"), [(1, 1, 1), (2, 2, 2), (4, 4, 2), (3, 3, 3), (8, 4, 4), (5, 5, 5)]
)
def test_a_team_is_a_host_where_there_are_several(world_size: int, local: int, size: int) -> None:
    assert strategy_options(Execution(strategy="hsdp"), Place(0, world_size, 0, local)) == {"shard_size": size}


def test_peers_own_neighbouring_runs_and_members_have_everything_once() -> None:
    teams = [Team(rank, 6, 3) for rank in range(6)]
    assert [list(team.members) for team in teams] == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
    assert [list(team.peers(team.rank)) for team in teams] == [[0, 3], [1, 4], [2, 5], [0, 3], [1, 4], [2, 5]]
    runs = [teams[0].run_of(rank) for rank in range(6)]
    assert sorted(runs) == list(range(6))
    for rank in range(3):
        assert runs[rank + 3] == runs[rank] + 1
