"""`run.stage`: one rank of a host copies, and the others wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest

import unisono
from tests.worlds import outcomes_of_world, run_world
from unisono.data import stage as module


def copy(source: str, target: str) -> tuple[int, bytes]:
    """Returns how many pieces this rank read, and what is there when it goes on."""
    reads, read = [0], module._Reader.read

    def counted(*args: object) -> bytes:
        reads[0] += 1
        return read(*args)  # type: ignore[arg-type]

    module._Reader.read = counted  # type: ignore[method-assign,assignment]
    with unisono.init(timeout_s=20) as run:
        run.stage(source, target, piece_bytes=1000)
        return reads[0], Path(target, "one").read_bytes()


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_rank_of_a_host_copies(tmp_path: Path, world_size: int) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one").write_bytes(b"x" * 12_345)
    found = run_world(world_size, copy, str(tmp_path / "source"), str(tmp_path / "target"))
    assert found == [(13 if rank == 0 else 0, b"x" * 12_345) for rank in range(world_size)]


def test_a_failure_reaches_all(tmp_path: Path) -> None:
    for outcome in outcomes_of_world(3, copy, str(tmp_path / "nothing"), str(tmp_path / "target"), timeout_s=30):
        assert "there is nothing to copy at" in str(outcome.error)
