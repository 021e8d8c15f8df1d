"""What the documents show, works: code parses, commands exist, links lead somewhere, examples run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unisono

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_python_parses_and_uses_names_that_exist(document: Path) -> None:
    for language, code in BLOCK.findall(document.read_text()):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                home = {"run": unisono.Run, "unisono": unisono}.get(node.value.id)
                assert home is None or hasattr(home, node.attr), f"{node.value.id}.{node.attr} does not exist"


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_the_commands_of_the_documents_exist() -> None:
    known = {}
    for command in ("train", "run", "verify", "checkpoint", "stage"):
        shown = subprocess.run([sys.executable, "-m", "unisono", command, "--help"], capture_output=True, text=True)
        known[command] = set(re.findall(r"--[a-z-]+", shown.stdout))
        assert known[command], shown.stderr
    seen = 0
    for document in DOCUMENTS:
        for _, code in BLOCK.findall(document.read_text()):
            for command, rest in re.findall(r"^\$? ?unisono (\w+)(.*)$", code, re.MULTILINE):
                own = rest.split(".py")[0] if command == "run" else rest  # what follows a script is the script's
                assert set(re.findall(r"--[a-z-]+", own)) <= known[command], (
                    f"{names(document)}: unisono {command}{rest}"
                )
                seen += 1
    assert seen >= 4


def test_the_example_loop_has_one_digest_on_one_and_two_processes(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "own_loop.py")
    alone = [sys.executable, script]
    two = [sys.executable, "-m", "unisono", "run", "--nproc", "2", script]
    lines = []
    for command in (alone, two):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        lines.append(done.stdout.splitlines())
    assert lines[0][:-1] == lines[1][:-1]
    assert lines[0][-1].split()[-1] == lines[1][-1].split()[-1]
    assert float(lines[0][-2].split()[-1]) > 0.9


def test_the_example_recipe_trains(tmp_path: Path) -> None:
    recipe = str(ROOT / "examples" / "my_recipe.py")
    command = [sys.executable, "-m", "unisono", "train", recipe, "--nproc", "1", "--set", "width=128"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "sha256:" in done.stdout
