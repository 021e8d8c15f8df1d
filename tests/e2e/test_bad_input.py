"""Wrong input ends with exit code 2 and one sentence: what is wrong, where, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import UNISONO, Done, InProcess, run

# A recipe that works, with one thing to be made wrong in each case.
RECIPE = """
import torch, unisono
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return {size}
    def __getitem__(self, index):
        return torch.zeros({shape}), index % 2

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.zeros(4), 0

def loss(model, batch):
    value = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return {loss}

def recipe(*, width: int = 4, lr: float = 0.1, deep: bool = False, name: str = "x"):
    return unisono.Recipe(
        model=lambda: nn.Linear(4, 2), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=lr),
        train={train}, global_batch={global_batch}, micro_batch={micro_batch}, steps=2,
    )
"""
GOOD = {
    "size": "8", "shape": "4", "loss": "value", "train": "Data()", "global_batch": "4", "micro_batch": "2",
}  # fmt: skip


@pytest.fixture
def unisono(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> InProcess:
    return InProcess(monkeypatch, capfd, tmp_path)


def recipe_file(folder: Path, text: str | None = None, **wrong: str) -> str:
    text = RECIPE.format(**{**GOOD, **wrong}) if text is None else text
    (folder / "mine.py").write_text(text)
    return "mine.py"


def check(done: Done, *parts: str) -> None:
    """The last line is the one sentence; before it stands at most what was started, and how far it came."""
    lines = done.err.splitlines()
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    assert lines[-1].startswith("unisono: error: ")
    assert len([line for line in lines if not line.startswith(("step ", "mine: "))]) == 1, done.err
    for part in parts:
        assert part in lines[-1], f"{part!r} is not in {lines[-1]!r}"


def test_the_recipe_works_as_it_stands(unisono: InProcess, tmp_path: Path) -> None:
    assert unisono("train", recipe_file(tmp_path), "--nproc", "1", "--json").summary["steps"] == 2


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x = 1\n", ["mine.py has no function `recipe`", "def recipe"]),
        ("recipe = 3\n", ["mine.py has no function `recipe`"]),
        ("import unisono\nrun = unisono.init()\n", ["has no function `recipe`", "with `unisono run mine.py`"]),
        ("def recipe():\n    return {}\n", ["mine.py", "returned dict", "unisono.Recipe"]),
        ("def recipe():\n    return None\n", ["returned NoneType"]),
        ("def recipe():\n    x = 1\n    return 1 / 0\n", ["mine.py", "ZeroDivisionError", "line 3"]),
        ("import no_such_module\n", ["mine.py", "ModuleNotFoundError", "no_such_module", "line 1"]),
        ("x = 1\ndef recipe(:\n", ["mine.py", "SyntaxError", "line 2"]),
        ("import sys\nsys.exit('no data')\n", ["mine.py", "no data", "line 2"]),
        ("def recipe(lr):\n    return None\n", ["needs a value", "'lr'", "--set lr="]),
    ],
)
def test_a_recipe_file_that_is_none(unisono: InProcess, tmp_path: Path, text: str, parts: list[str]) -> None:
    check(unisono("train", recipe_file(tmp_path, text)), *parts)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["no/such.py"], ["no/such.py does not exist"]),
        (["nothere.py"], ["nothere.py does not exist"]),
        (["."], [". is no file"]),
        (["digit"], ["no recipe 'digit'", "did you mean 'digits'?"]),
        (["zzzzzz"], ["no recipe 'zzzzzz'", "stdlib-gpt", "digits"]),
        (["mine.py", "--set", "widht=8"], ["no option 'widht'", "did you mean 'width'?"]),
        (["mine.py", "--set", "zzzzzz=8"], ["no option 'zzzzzz'", "width, lr, deep, name"]),
        (["mine.py", "--set", "width=wide"], ["width=wide", "takes an int", "4"]),
        (["mine.py", "--set", "width=2.5"], ["width=2.5", "takes an int"]),
        (["mine.py", "--set", "lr=fast"], ["lr=fast", "takes a float", "0.1"]),
        (["mine.py", "--set", "deep=3"], ["deep=3", "takes a bool"]),
        (["mine.py", "--set", "width"], ["--set width", "KEY=VALUE"]),
        (["mine.py", "--set", "=3"], ["--set =3", "KEY=VALUE"]),
        (["mine.py", "--nproc", "0"], ["--nproc 0", "at least one"]),
        (["mine.py", "--nproc", "-1"], ["--nproc -1", "at least one"]),
        (["mine.py", "--nproc", "3"], ["3 processes", "2 micro-batches", "at most 2", "micro_batch"]),
        (["mine.py", "--num-workers", "-1"], ["--num-workers -1", "0 or more"]),
        (["mine.py", "--steps", "0"], ["--steps", "positive integer", "0"]),
        (["mine.py", "--steps", "-3"], ["--steps", "positive integer", "-3"]),
        (["mine.py", "--strategy", "dpp"], ["no strategy 'dpp'", "ddp"]),
        (["mine.py", "--strategy", "zzzzzz"], ["no strategy 'zzzzzz'", "ddp"]),
        (["mine.py", "--shard-size", "2"], ["shard_size is for the strategy hsdp", "this is ddp"]),
        (["mine.py", "--strategy", "hsdp", "--shard-size", "2", "--nproc", "1"], ["shard_size 2", "does not divide"]),
        (["mine.py", "--offload", "tape"], ["offload 'tape' is neither cpu nor disk"]),
        (["mine.py", "--offload", "cpu"], ["offload cpu is for accelerators"]),
        (["mine.py", "--offload", "disk", "--offload-dir", "no"], ["folder for offload does not exist: no"]),
        (["mine.py", "--offload-dir", "."], ["offload_dir is for offload disk"]),
        (["mine.py", "--run-dir", "there"], ["run folder there exists", "choose another"]),
        (["mine.py", "--run-dir", "mine.py/x"], ["run folder mine.py/x", "cannot be made"]),
    ],
    ids=" ".join,
)
def test_arguments(unisono: InProcess, tmp_path: Path, arguments: list[str], parts: list[str]) -> None:
    recipe_file(tmp_path)
    (tmp_path / "there").mkdir()
    check(unisono("train", *arguments), *parts)
    assert not (tmp_path / "runs").exists()
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        ({"global_batch": "0"}, ["Recipe.global_batch", "positive integer", "got 0"]),
        ({"global_batch": "-1"}, ["Recipe.global_batch", "positive integer", "got -1"]),
        ({"global_batch": "2.5"}, ["Recipe.global_batch", "positive integer", "got 2.5"]),
        ({"global_batch": "'x'"}, ["Recipe.global_batch", "positive integer", "got 'x'"]),
        ({"global_batch": "True"}, ["Recipe.global_batch", "positive integer", "got True"]),
        ({"micro_batch": "0"}, ["Recipe.micro_batch", "positive integer", "got 0"]),
        ({"micro_batch": "8"}, ["micro_batch 8", "larger than global_batch 4"]),
        ({"train": "None"}, ["Recipe.train", "None"]),
        ({"size": "0"}, ["dataset", "(Data)", "is empty"]),
        ({"train": "Stream()"}, ["iterable-style", "Stream", "map-style"]),
        ({"train": "(x for x in [1])"}, ["iterable-style", "generator", "map-style"]),
        ({"train": "lambda: None"}, ["returned None", "dataset"]),
        ({"train": "3"}, ["dataset", "int"]),
        ({"shape": "5 if index == 6 else 4"}, ["sample 6", "does not collate", "collate"]),
        ({"loss": "value * float('nan')"}, ["step 0, micro-batch 0", "nan", "weights are still the initial ones"]),
        ({"loss": "value / 0"}, ["step 0, micro-batch 0", "inf"]),
        ({"loss": "value.expand(2)"}, ["step 0, micro-batch 0", "scalar", "(2,)"]),
        ({"loss": "value.detach()"}, ["step 0, micro-batch 0", "needs no gradient"]),
        ({"loss": "value.item()"}, ["step 0, micro-batch 0", "scalar", "float"]),
        ({"loss": "None"}, ["step 0, micro-batch 0", "scalar", "NoneType"]),
        ({"loss": "value, 1.0, 2.0"}, ["loss returned a tuple of 3"]),
        ({"loss": "value, -1.0"}, ["weight", "-1.0", "0 or more"]),
        ({"loss": "value, 'x'"}, ["weight", "'x'"]),
    ],
    ids=lambda value: "".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_recipe_that_cannot_work(unisono: InProcess, tmp_path: Path, wrong: dict[str, str], parts: list[str]) -> None:
    check(unisono("train", recipe_file(tmp_path, **wrong), "--nproc", "1"), *parts)


def test_a_sample_that_does_not_collate_is_named_from_a_loader_worker_too(unisono: InProcess, tmp_path: Path) -> None:
    file = recipe_file(tmp_path, shape="5 if index == 6 else 4")
    check(unisono("train", file, "--nproc", "1", "--num-workers", "1"), "sample 6", "does not collate")


def test_a_loss_that_is_nan_later_says_after_which_step_the_weights_are(unisono: InProcess, tmp_path: Path) -> None:
    file = recipe_file(tmp_path, loss="value * float('nan' if batch[0].new_tensor(calls()) > 3 else 1)")
    with (tmp_path / file).open("a") as text:
        text.write("\nimport itertools\ncounter = itertools.count(1)\ndef calls():\n    return next(counter)\n")
    check(unisono("train", file, "--nproc", "1"), "step 1, micro-batch 1", "nan", "after 1 step")


def test_debug_shows_where_it_was_raised(unisono: InProcess, tmp_path: Path) -> None:
    done = unisono("train", recipe_file(tmp_path, "def recipe():\n    return 1 / 0\n"), "--debug")
    assert done.code == 2
    assert "Traceback" in done.err
    assert 'mine.py", line 2, in recipe' in done.err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "--nproc", "x"], "--nproc"),
        (["train", "--no-such-option"], "--no-such-option"),
        (["run"], "script"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_what_is_no_command_line(unisono: InProcess, arguments: list[str], part: str) -> None:
    done = unisono(*arguments)
    assert done.code == 2
    assert part in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["nothere.py"], ["script nothere.py does not exist"]),
        (["--nproc", "0", "mine.py"], ["--nproc 0", "at least one"]),
        (["--strategy", "dpp", "mine.py"], ["no strategy 'dpp'", "ddp"]),
        (["--strategy", "hsdp", "--shard-size", "2", "--nproc", "1", "mine.py"], ["shard_size 2", "does not divide"]),
        (["--offload", "tape", "mine.py"], ["offload 'tape' is neither cpu nor disk"]),
        (["--offload", "cpu", "mine.py"], ["offload cpu is for accelerators"]),
        (["--offload", "disk", "--offload-dir", "no", "mine.py"], ["folder for offload does not exist: no"]),
        (["--num-workers", "-2", "mine.py"], ["--num-workers -2", "0 or more"]),
    ],
    ids=" ".join,
)
def test_a_script_is_not_started(unisono: InProcess, tmp_path: Path, arguments: list[str], parts: list[str]) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('started')\n")
    check(unisono("run", *arguments), *parts)
    assert not (tmp_path / "runs").exists()


def test_a_nan_on_one_rank_is_the_sentence_of_all(tmp_path: Path) -> None:
    """Sample 3 is in the second micro-batch of one of the two steps: one rank sees it, the other has done nothing."""
    file = recipe_file(tmp_path, loss="value * float('nan' if (batch[1] == 7).any() else 1)")
    text = (tmp_path / file).read_text().replace("index % 2", "7 if index == 3 else index % 2")
    text = text.replace("model(batch[0]), batch[1])", "model(batch[0]), batch[1] % 2)")
    (tmp_path / file).write_text(text)
    done = run([*UNISONO, "train", file, "--nproc", "2"], tmp_path)
    check(done, "rank ", "micro-batch ", "is nan", "weights are still")
