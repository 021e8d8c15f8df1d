"""Where a process finds itself."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from unisono.errors import InputError
from unisono.launch.environment import Place, detect, usable_cores

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_alone() -> None:
    assert detect({}) == Place(rank=0, world_size=1, local_rank=0, local_world_size=1, origin="alone", restarts=0)
    # An address is often left in a shell or a container; by itself it starts nothing.
    assert detect({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}) == detect({})


def test_under_torchrun() -> None:
    found = detect(TORCHRUN)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.origin, found.restarts) == ("torchrun", 2)
    assert found.run_dir is None
    assert found.flags == {}


def test_what_a_launcher_may_leave_out() -> None:
    slim = {
        name: value
        for name, value in TORCHRUN.items()
        if name not in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    }
    assert detect(slim).restarts == 0
    assert detect(slim).local_world_size == 8


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_set(missing: str) -> None:
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(InputError, match=f"but not {missing}: start with `unisono run`"):
        detect(environment)
    with pytest.raises(InputError, match=missing):
        detect({**environment, missing: ""})


def test_one_variable_alone_names_all_that_are_missing() -> None:
    with pytest.raises(InputError) as caught:
        detect({"WORLD_SIZE": "2"})
    assert "sets WORLD_SIZE but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in str(caught.value)
    assert "unset it" in str(caught.value)
    with pytest.raises(InputError, match="unset them"):
        detect({"WORLD_SIZE": "2", "RANK": "0"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "RANK=8, which is not below WORLD_SIZE=8"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"RANK": "one"}, "RANK='one', which is no integer"),
        ({"LOCAL_WORLD_SIZE": "4.0"}, "LOCAL_WORLD_SIZE='4.0', which is no integer"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT='x', which is no integer"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9"),
    ],
)
def test_contradictory(changes: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        detect({**TORCHRUN, **changes})


def test_what_our_launcher_hands_over() -> None:
    job = {"run_dir": "runs/a", "flags": {"strategy": "ddp", "num_workers": 2}, "error_dir": "e"}
    for environment in ({}, TORCHRUN):
        found = detect({**environment, "UNISONO_JOB": json.dumps(job)})
        assert found.run_dir == Path("runs/a")
        assert found.flags == {"strategy": "ddp", "num_workers": 2}


@pytest.mark.parametrize("text", ["{", "x", "3", "[]", "null"])
@pytest.mark.parametrize("environment", [{}, TORCHRUN], ids=["alone", "torchrun"])
def test_a_job_that_cannot_be_read(environment: dict[str, str], text: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"sets UNISONO_JOB={text!r}, which is no JSON object: unset it")):
        detect({**environment, "UNISONO_JOB": text})
    assert detect({**environment, "UNISONO_JOB": ""}) == detect(environment)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert detect().rank == 5


def test_usable_cores() -> None:
    cores = usable_cores()
    assert 1 <= cores <= (os.cpu_count() or 1)
    if hasattr(os, "sched_setaffinity"):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        try:
            assert usable_cores() == 1
        finally:
            os.sched_setaffinity(0, before)
        assert usable_cores() == cores
