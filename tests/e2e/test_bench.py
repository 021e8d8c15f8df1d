"""`unisono bench`: what it prints, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.commands import UNISONO, InProcess, run


def test_it_measures_in_turn_and_prints_rows(tmp_path: Path) -> None:
    systems = "plain,unisono-zero2-gloo,ddp-on-shm"
    options = ["--workload", "tiny", "--systems", systems, "--rounds", "2", "--picture", "bars.svg", "--json"]
    done = run([*UNISONO, "bench", *options], tmp_path)
    assert done.code == 0, done.err
    rows = {row["system"]: row for row in json.loads(done.out)}
    assert set(rows) == set(systems.split(","))
    for row in rows.values():
        assert set(row) >= {"workload", "system", "nproc", "step_s", "ratio_to_plain", "spread", "peak_rss_mb"}
        assert row["workload"] == "tiny" and row["nproc"] == 2
        assert 0 < row["spread"][0] <= row["ratio_to_plain"] <= row["spread"][1]
        assert 50 < row["peak_rss_mb"] < 5_000 and 0 < row["step_s"] < 10 and row["first_step_s"] > 0.1
    assert rows["plain"]["ratio_to_plain"] == 1.0
    # Each rank sends its gradient to one other, in whatever parts. (Other tests use it too: no upper bound.)
    assert rows["unisono-zero2-gloo"]["wire_bytes"] > 8970 * 4
    picture = ElementTree.parse(tmp_path / "bars.svg").getroot()
    texts = [element.text or "" for element in picture.iter() if element.tag.endswith("text")]
    assert all(system in texts for system in rows)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--workload", "huge"], ["--workload huge", "tiny, mlp, gpt, cnn, wide"]),
        (["--peers", "horovod"], ["--peers horovod", "accelerate"]),
        (["--systems", "plain,magic"], ["--systems magic", "unisono-ddp-shm"]),
        (["--nproc", "0"], ["--nproc 0", "at least 1"]),
        (["--rounds", "0"], ["--rounds 0", "at least 1"]),
        (["--picture", "no/such/a.svg"], ["no/such/a.svg", "no such folder"]),
    ],
)
def test_wrong_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    parts: list[str],
) -> None:
    done = InProcess(monkeypatch, capfd, tmp_path)("bench", *options)
    assert done.code == 2 and done.err.count("\n") == 1
    for part in parts:
        assert part in done.err
