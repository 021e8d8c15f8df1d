"""What has to be the same around all ranks is compared before anything else, and a slow rank is named."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.worlds import outcomes_of_world, run_world
from unisono.errors import InputError
from unisono.launch import surroundings
from unisono.launch.environment import detect

DATA = torch.utils.data.TensorDataset(torch.arange(120.0).view(60, 2), torch.arange(60) % 3)


def opened(given: str, rank: int) -> None:
    mine = detect().rank
    if given == "torch" and mine == rank:
        torch.__version__ = "1.0"
    if given == "processor" and mine == rank:
        torch.backends.cpu.get_cpu_capability = lambda: "SSE"
    if given == "unisono" and mine == rank:
        surroundings._checksum = lambda files: f"{len(files):08x}"
    with unisono.init(timeout_s=20, seed=mine if given == "seed" else 0):
        raise AssertionError("it began")


@pytest.mark.parametrize(
    ("given", "rank", "words"),
    [
        ("torch", 2, "has torch 1.0, and rank 0"),
        ("processor", 1, "set ATEN_CPU_CAPABILITY=avx2"),
        ("unisono", 1, "install the same unisono on all hosts"),
        ("seed", 1, "has seed 1, and rank 0"),
    ],
)
def test_a_rank_in_other_surroundings_is_named_on_every_rank(given: str, rank: int, words: str) -> None:
    for outcome in outcomes_of_world(3, opened, given, rank):
        assert isinstance(outcome.error, InputError), repr(outcome.error)
        assert f"rank {rank} (" in str(outcome.error)
        assert words in str(outcome.error)


def loaded(rank: int, change: str) -> None:
    data: Any = DATA
    if detect().rank == rank:
        if change == "values":
            data = torch.utils.data.TensorDataset(DATA.tensors[0] + 1, DATA.tensors[1])
        elif change == "order":
            data = torch.utils.data.Subset(DATA, range(59, -1, -1))
        else:
            data = torch.utils.data.ConcatDataset([DATA, DATA])
    with unisono.init(timeout_s=20) as run:
        model = nn.Linear(2, 3)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, global_batch=12, micro_batch=4)


@pytest.mark.parametrize("change", ["values", "order", "length"])
def test_another_dataset_is_noticed_before_training(change: str) -> None:
    for outcome in outcomes_of_world(2, loaded, 1, change):
        assert isinstance(outcome.error, InputError), repr(outcome.error)
        assert "rank 1 has another dataset than rank 0" in str(outcome.error)


class Slow(torch.utils.data.Dataset[Any]):
    """Rank 1's data come from far away."""

    def __len__(self) -> int:
        return 900

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002 if detect().rank == 1 else 0.0)
        return torch.randn(2), index % 3


def slow(folder: str) -> list[str]:
    said: list[str] = []
    with unisono.init(timeout_s=20, run_dir=Path(folder) / "it") as run:
        run.note = said.append  # type: ignore[method-assign]
        model = nn.Linear(2, 3)
        model, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), Slow(), global_batch=12, micro_batch=6
        )
        for inputs, targets in loader:
            run.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
    return said


def test_a_slow_rank_is_in_the_records_and_named(tmp_path: Path) -> None:
    said = " ".join(run_world(2, slow, str(tmp_path))[0])
    records = [json.loads(line) for line in (tmp_path / "it" / "metrics.jsonl").read_text().splitlines()]
    late = records[5:]
    assert sum(record["slowest_rank"] == 1 for record in late) > 0.8 * len(late)
    assert sorted(record["imbalance"] for record in late)[len(late) // 2] > 1.3
    assert said.count("rank 1 (") == 1
    assert "wait for data" in said
