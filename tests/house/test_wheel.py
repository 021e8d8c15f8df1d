"""What a user gets who installs the wheel, not the checkout."""

from __future__ import annotations

import email
import email.message
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Build in a copy: a build in place packs what an older build/ still holds."""
    copy = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


def test_every_source_file_is_inside_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    source = ROOT / "src"
    expected = {path.relative_to(source).as_posix() for path in (source / "unisono").rglob("*.py")}
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected | {"unisono/py.typed"}


def test_the_licence_is_inside_and_named(wheel: zipfile.ZipFile) -> None:
    (licence,) = (name for name in wheel.namelist() if name.endswith("/licenses/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert _metadata(wheel)["License-Expression"] == "Apache-2.0"


def test_the_command_is_declared(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert "unisono = unisono.cli:main" in wheel.read(entry_points).decode()


def test_python_and_torch_are_required(wheel: zipfile.ZipFile) -> None:
    metadata = _metadata(wheel)
    assert metadata["Requires-Python"] == ">=3.11"
    assert "torch>=2.13.0" in metadata.get_all("Requires-Dist", [])


def _metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))
