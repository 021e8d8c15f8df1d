"""Door 1: one script, started in every way there is."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

from tests.commands import UNISONO, run, started, steps

SCRIPT = """
import argparse, json, sys
import torch
from torch import nn
import unisono
from neighbour import Data

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--lr", type=float, default=9.0)
args = parser.parse_args()

run = unisono.init(seed=3, timeout_s=60)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
before = unisono.weights_digest(model.state_dict())
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
model, optimizer, loader = run.prepare(model, optimizer, Data(), global_batch=6, micro_batch=2)
for epoch in run.epochs(2):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
print("rank", run.rank, "of", run.world_size, flush=True)
found = {"before": before, "after": run.weights_digest(), "rank": run.rank, "world_size": run.world_size,
         "argv": sys.argv, "lr": args.lr, "name": __name__, "step": run.step}
with open(f"{args.out}-{run.rank}.json", "w") as file:
    json.dump(found, file)
sys.exit(0)
"""
NEIGHBOUR = """
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 13
    def __getitem__(self, index):
        return torch.randn(4) + index % 2, index % 2
"""


def test_one_script_has_one_digest_however_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands = {
        "alone": [sys.executable, "train.py", "alone", "--lr", "0.05"],
        "ours": [*UNISONO, "run", "--nproc", "2", "--run-dir", "mine", "train.py", "--", "ours", "--lr", "0.05"],
        "torchrun": [*torchrun, "train.py", "torchrun", "--lr", "0.05"],
    }
    done = {name: run(command, tmp_path) for name, command in commands.items()}
    assert {name: ended.code for name, ended in done.items()} == dict.fromkeys(commands, 0), done
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*-?.json")}
    assert sorted(found) == ["alone-0", "ours-0", "ours-1", "torchrun-0", "torchrun-1"]
    assert len({one["after"] for one in found.values()}) == 1, found
    for name, one in found.items():
        way, _, rank = name.partition("-")
        assert one["before"] != one["after"]
        assert (one["rank"], one["world_size"]) == (int(rank), 1 if way == "alone" else 2)
        assert (one["argv"][1:], one["lr"]) == ([way, "--lr", "0.05"], 0.05)
        assert Path(one["argv"][0]).name == "train.py"
        assert (one["name"], one["step"]) == ("__main__", 6)

    # Alone: nothing is written, and one sentence says how to use the other cores.
    assert not (tmp_path / "runs").exists()
    assert done["alone"].out == "rank 0 of 1\n"
    assert "Traceback" not in done["alone"].err

    # Under our launcher: a run folder; what rank 0 prints is seen, what others print is in their logs.
    folder = tmp_path / "mine"
    assert done["ours"].out == "rank 0 of 2\n"
    assert (folder / "logs/rank-1.log").read_text() == "rank 1 of 2\n"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["weights_digest"] == found["ours-0"]["after"]
    assert (summary["steps"], summary["samples"], summary["nproc"], summary["finished"]) == (6, 26, 2, True)
    assert [record["step"] for record in steps(folder)] == [1, 2, 3, 4, 5, 6]


EXITS: dict[str, tuple[str, int, str | None]] = {
    "ends": ("print('fine')", 0, None),
    "exit": ("import sys; sys.exit()", 0, None),
    "number": ("import sys; sys.exit(3)", 1, "sys.exit(3)"),
    "text": ("import sys; sys.exit('no data here')", 1, "no data here"),
    "usage": ("import argparse; argparse.ArgumentParser().parse_args()", 2, "sys.exit(2)"),
    "raises": ("raise KeyError('boom')", 1, "KeyError: 'boom'"),
    "crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 1, "SIGSEGV"),
    "elastic": (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main(): raise KeyError('boom')\nmain()",
        1,
        "KeyError: 'boom'",
    ),
}


def test_exit_codes(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:  # all at once: each waits for torch on one core
        running = {}
        for name, (script, _, _) in EXITS.items():
            (tmp_path / f"{name}.py").write_text(script)
            command = [*UNISONO, "run", "--nproc", "1", f"{name}.py", "--", "--flag"]
            running[name] = stack.enter_context(started(command, tmp_path))
        done = {name: one.wait() for name, one in running.items()}
    assert {name: one.code for name, one in done.items()} == {name: code for name, (_, code, _) in EXITS.items()}, done
    for name, (_, _, said) in EXITS.items():
        *before, last = done[name].err.splitlines()
        assert done[name].err.count("Traceback") == int(name in ("raises", "elastic"))
        assert not [line for line in before if "ranks.py" in line], "a traceback starts at the user's own first frame"
        if said is None:
            assert "error" not in done[name].err
        else:
            assert last.startswith("unisono: error: rank 0 failed: ")
            assert said in last


def test_a_rank_that_exits_in_mid_run_ends_the_job(tmp_path: Path) -> None:
    text = SCRIPT.replace("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        leave()\n")
    text = text.replace(
        "run = unisono.init", "def leave():\n    if run.rank == 1 and run.step == 2: sys.exit(3)\nrun = unisono.init"
    )
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    began = time.monotonic()
    done = run([*UNISONO, "run", "--nproc", "2", "--run-dir", "mine", "train.py", "out"], tmp_path)
    assert done.code == 1
    assert time.monotonic() - began < 50, "the time-out of 60 s had to end it"
    assert done.err.splitlines()[-1] == "unisono: error: rank 1 failed: the script called sys.exit(3)"
    assert not list(tmp_path.glob("out-*.json"))
    assert len(steps(tmp_path / "mine")) == 2
