"""Rules for each file, checked on its syntax tree rather than its text, so that prose may say `print(`."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "unisono"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

MAX_LINES = 400
MAY_PRINT = ("cli/", "cli.py", "observe/", "observe.py", "run.py")
MAY_READ_THE_ENVIRONMENT = ("launch/",)
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def test_the_rules_are_applied_to_something() -> None:
    assert "__init__.py" in FILES


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_short(file: str) -> None:
    num_lines = len((PACKAGE / file).read_text().splitlines())
    assert num_lines <= MAX_LINES, f"{file} has {num_lines} lines; find the second noun in it and give it a file"


@pytest.mark.parametrize("file", FILES)
def test_a_module_says_what_it_is(file: str) -> None:
    assert ast.get_docstring(_tree(file)), f"{file} has no docstring"


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith(MAY_PRINT)])
def test_only_the_edge_prints(file: str) -> None:
    lines = list(_prints(_tree(file)))
    assert not lines, f"{file} prints in lines {lines}; raise, return or emit an event instead"


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith(MAY_READ_THE_ENVIRONMENT)])
def test_only_launch_reads_the_environment(file: str) -> None:
    lines = list(_environment_reads(_tree(file)))
    assert not lines, f"{file} uses environment variables in lines {lines}; take a value from launch/environment.py"


def test_the_rules_see_what_they_forbid() -> None:
    assert list(_prints(ast.parse("print(1)\nlog.print(2)\n'print(3)'"))) == [1]
    code = "import os\nos.environ['A']\nos.getenv('A')\nfrom os import environ"
    assert sorted(_environment_reads(ast.parse(code))) == [2, 3, 4]


def test_the_lock_pins_everything_exactly() -> None:
    """A local suffix or a path would install on the machine that wrote the lock and on no other."""
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    loose = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)]
    assert not loose, f"write these as name==version: {loose}"

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    missing = {_distribution(line) for line in wanted} - {_distribution(line) for line in lines}
    assert not missing, f"pyproject.toml asks for these and requirements.lock lacks them: {sorted(missing)}"


def _tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(), filename=file)


def _prints(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno


def _environment_reads(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in ENVIRONMENT:
                yield node.lineno
            case ast.ImportFrom(module="os", names=aliases) if ENVIRONMENT & {alias.name for alias in aliases}:
                yield node.lineno


def _distribution(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name.group()).lower()
