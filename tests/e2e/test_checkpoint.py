"""`unisono checkpoint`: what people ask of checkpoints that lie on a disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.commands import InProcess
from tests.multiproc.test_strategies import Tied

RECIPE = """
import torch, unisono
from torch import nn
from tests.multiproc.test_strategies import Tied, data

def hits(model, batch):
    return {"hits": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}

def recipe(lr: float = 0.01):
    return unisono.Recipe(
        model=Tied, loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), train=data(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=lr), global_batch=16, micro_batch=4, steps=6,
        eval=data(), metrics=hits,
    )
"""


@pytest.fixture
def unisono(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> InProcess:
    (tmp_path / "mine.py").write_text(RECIPE)
    found = InProcess(monkeypatch, capfd, tmp_path)
    options = ["--nproc", "1", "--checkpoint-every", "2"]
    assert found("train", "mine.py", "--run-dir", "a", *options).code == 0
    assert found("train", "mine.py", "--run-dir", "b", *options, "--set", "lr=0.02").code == 0
    return found


def test_what_is_there(unisono: InProcess) -> None:
    found = json.loads(unisono("checkpoint", "ls", "a", "--json").out)
    assert [row["step"] for row in found] == [2, 4, 6]
    assert [row["samples"] for row in found] == [32, 50, 82]
    assert found[2]["metrics"].keys() == {"hits"}
    assert found[0]["saved_by"]["nproc"] == 1
    shown = unisono("checkpoint", "ls", "a")
    assert shown.code == 0
    for part in ("step-00000002", "step-00000006", "hits 0.", "1 x ddp"):
        assert part in shown.out


def test_what_is_in_one(unisono: InProcess) -> None:
    found = json.loads(unisono("checkpoint", "show", "a/checkpoints/step-00000004", "--json").out)
    assert found["state"]["step"] == 4
    assert found["state"]["tied"] == {"head.weight": "embedding.weight"}, "case 21: tied weights are there once"
    names = {row["name"] for row in found["tensors"] if row["file"] == "model.safetensors"}
    assert "embedding.weight" in names and "head.weight" not in names
    shown = unisono("checkpoint", "show", "a")
    assert "step 6" in shown.out
    assert "embedding.weight/exp_avg_sq" in shown.out


def test_what_differs(unisono: InProcess) -> None:
    same = unisono("checkpoint", "diff", "a", "a")
    assert (same.code, same.out) == (0, "the same, to the last bit\n")
    other = unisono("checkpoint", "diff", "a", "b", "--json")
    assert other.code == 1
    changes = {(change["file"], change["name"]): change for change in json.loads(other.out)}
    weights = changes["model.safetensors", "embedding.weight"]
    assert weights["what"] == "values" and weights["ulps"] > 0 and weights["elements"] == 11 * 14
    assert ("optimizer.safetensors", "embedding.weight/step") not in changes
    assert "embedding.weight" in unisono("checkpoint", "diff", "a", "b").out


def test_what_is_damaged(unisono: InProcess, tmp_path: Path) -> None:
    assert unisono("checkpoint", "verify", "a").out.count(": whole") == 3
    file = tmp_path / "a" / "checkpoints" / "step-00000004" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = unisono("checkpoint", "verify", "a")
    assert done.code == 1
    assert "step-00000004: " in done.out and "model.safetensors is damaged" in done.out
    assert [row["whole"] for row in json.loads(unisono("checkpoint", "verify", "a", "--json").out)] == [
        True,
        False,
        True,
    ]
    (file.parent / "state.json").unlink()
    assert "state.json is missing" in unisono("checkpoint", "ls", "a").out
    refused = unisono("checkpoint", "export", str(file.parent), "out")
    assert refused.code == 2 and not (tmp_path / "out").exists()


def test_weights_are_taken_along(unisono: InProcess, tmp_path: Path) -> None:
    assert unisono("checkpoint", "export", "a", "out").code == 0
    assert safetensors.torch.load_file(tmp_path / "out" / "model.safetensors").keys() < Tied().state_dict().keys()
    assert unisono("checkpoint", "export", "a", "out.pt").code == 0
    model = Tied()
    model.load_state_dict(torch.load(tmp_path / "out.pt"))
    assert torch.equal(model.scale, safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")["scale"])
    assert "there already" in unisono("checkpoint", "export", "a", "out.pt").err
    assert "there already" in unisono("checkpoint", "export", "a", "out").err


@pytest.mark.parametrize("command", ["ls", "show", "verify", "export"])
def test_nothing_there_is_one_sentence(unisono: InProcess, command: str) -> None:
    done = unisono("checkpoint", command, "nothing", *(["out"] if command == "export" else []))
    assert (done.code, done.err) == (2, "unisono: error: there is no folder nothing\n")
