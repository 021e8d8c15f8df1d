"""`unisono doctor`: what it finds on this machine, and what it makes of a bad one."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.commands import UNISONO, run
from unisono.verify import doctor, probe
from unisono.verify.doctor import examine


def test_it_examines_and_measures_this_machine(tmp_path: Path) -> None:
    done = run([*UNISONO, "doctor", "--json"], tmp_path)
    found = {one["what"]: one for one in json.loads(done.out)}
    assert done.code == int(any(one["wrong"] for one in found.values()))
    assert {"versions", "backends", "processor", "devices", "place", "cores", "memory bandwidth"} <= found.keys()
    assert any("all-reduce of 16 MB" in one["found"] for name, one in found.items() if "ranks, gloo" in name)


def test_a_run_that_is_none_is_refused(tmp_path: Path) -> None:
    done = run([*UNISONO, "doctor", "nowhere"], tmp_path)
    assert done.code == 2
    assert "nowhere has no flight records" in done.err


def test_what_will_go_wrong_is_found_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setattr(doctor, "_cpu_quota", lambda: 1.5)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 8)
    monkeypatch.setattr(doctor, "_memory_limit", lambda: 10_000_000)
    monkeypatch.setattr(doctor, "addresses", lambda: [("lo", "127.0.0.1"), ("eth7", "10.0.0.7")])
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda what: (256, 1024))
    found = {one.what: one for one in examine()}
    assert found["environment"].wrong
    assert "RANK but not WORLD_SIZE" in found["environment"].advice
    assert "slower" in found["variables"].advice
    assert "--nproc 1" in found["cores"].advice
    assert "kills one" in found["memory"].advice
    assert "ulimit -n 1024" in found["open files"].advice
    assert "--rdzv 10.0.0.7:PORT" in found["host name"].advice


def test_ranks_that_cannot_be_measured_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(transport: str, world_size: int) -> tuple[str, float, float]:
        raise probe.ProbeError("rank 1 ended: no")

    monkeypatch.setattr(doctor, "all_reduce", fail)
    monkeypatch.setattr(doctor, "memory_bandwidth", lambda: 1e9)
    found = list(doctor.measure())
    assert [one.wrong for one in found] == [False, True, True]
    assert "rank 1 ended: no" in found[1].advice
