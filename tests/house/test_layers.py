"""Imports go down only, and every module has a floor."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "unisono"


def test_imports_go_down_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True)
    assert code == 0, capsys.readouterr().out


def test_every_module_has_a_floor() -> None:
    """Floors are optional in the contract, so a misspelt one would hold nothing and say nothing."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {contract["id"]: contract for contract in config["tool"]["importlinter"]["contracts"]}
    floors = {name for layer in contracts["floors"]["layers"] for name in re.findall(r"[\w.]+", layer)}

    modules = {_module_name(path) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert modules
    homeless = {name for name in modules if not any(name == floor or name.startswith(f"{floor}.") for floor in floors)}
    assert not homeless, f"give these a floor under [tool.importlinter] in pyproject.toml: {sorted(homeless)}"


@pytest.mark.parametrize("file", ["data/order.py", "data/schedule.py", "numerics/tree.py"])
@pytest.mark.parametrize("code", ["import torch.distributed", "import torch\n\ntorch.distributed.barrier()"])
def test_the_pure_floor_may_not_name_torch_distributed(file: str, code: str) -> None:
    assert "TID251" in _ruff_says_of(code, file)


def test_the_floor_of_engines_may_name_torch_distributed() -> None:
    assert "TID251" not in _ruff_says_of("import torch.distributed", "comm/c10d.py")


def test_the_pure_floor_does_not_name_torch_distributed() -> None:
    done = _ruff("--select=TID251", "src")
    assert done.returncode == 0, done.stdout + done.stderr


def _ruff_says_of(code: str, file: str) -> str:
    return _ruff("--select=TID251", f"--stdin-filename=src/unisono/{file}", "-", stdin=f"{code}\n").stdout


def _ruff(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
