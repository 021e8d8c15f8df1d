"""`unisono verify` as its user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import UNISONO, run
from tests.multiproc.test_verify import RECIPE


def test_a_recipe_that_is_the_same_everywhere(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE.format(fault=""))
    command = [*UNISONO, "verify", "mine.py", "--worlds", "1,2", "--strategies", "zero2", "--steps", "2", "--json"]
    ended = run(command, tmp_path)
    assert ended.code == 0, ended
    found = json.loads(ended.out)
    assert found["agrees"] is True
    assert [(cell["strategy"], cell["nproc"], cell["agrees"]) for cell in found["cells"]] == [
        ("zero2", 1, True),
        ("zero2", 2, True),
        ("plain", 1, True),
        ("killed", 2, True),
    ]


@pytest.mark.slow
def test_a_recipe_that_is_not(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE.format(fault="seeded by rank"))
    ended = run([*UNISONO, "verify", "mine.py", "--worlds", "2", "--strategies", "ddp", "--steps", "2"], tmp_path)
    assert ended.code == 1, ended
    assert "step 1: " in ended.out
    assert "ulps" in ended.out
    assert "random numbers from a generator of their own or by rank" in " ".join(ended.out.split())
    assert "NOT the same" in ended.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits", "--worlds", "one"], "--worlds one: give numbers of processes"),
        (["digits", "--worlds", "0"], "a run needs at least one process"),
        (["digits", "--steps", "0"], "at least one step"),
        (["digits", "--strategies", "zero9"], "there is no strategy 'zero9'"),
        (["nothing"], "there is no recipe 'nothing'"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    ended = run([*UNISONO, "verify", *arguments], tmp_path)
    assert ended.code == 2
    assert words in ended.err
    assert "Traceback" not in ended.err
