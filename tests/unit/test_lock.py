"""A run's folder belongs to one run at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unisono.errors import InputError
from unisono.launch.lock import FolderLock

HOLD = "import sys, time; from pathlib import Path; from unisono.launch.lock import FolderLock; "
HOLD += "lock = FolderLock(Path(sys.argv[1])); print('there', flush=True); time.sleep(600)"


def test_it_is_free_again_when_its_owner_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "there\n"
        with pytest.raises(InputError, match="in use by another run"):
            FolderLock(tmp_path, timeout_s=0.2)
        owner.kill()
    FolderLock(tmp_path, timeout_s=5).release()
    assert not list(tmp_path.iterdir())


def test_it_is_given_back_once(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.release()
    lock.release()
    FolderLock(tmp_path, timeout_s=0).release()
