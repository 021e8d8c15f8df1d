"""Mirror: a run's folder in an object store, kept like the one on the disk."""

from __future__ import annotations

from pathlib import Path

from fsspec.core import url_to_fs

from unisono.checkpoint.format import STATE
from unisono.checkpoint.reader import checkpoints_in
from unisono.data.stage import StageError, stage
from unisono.errors import InputError

_FILES = ("recipe.json", "metrics.jsonl", "summary.json")


def is_remote(place: str) -> bool:
    """Whether a run's folder is named by a URL."""
    return "://" in place


def local_folder(url: str) -> Path:
    """The folder on the disk that goes with one in a store."""
    return Path("runs") / url.rstrip("/").rpartition("/")[2]


class Mirror:
    """See the module's docstring.

    Args:
        url: Of the run's folder in the store.
        folder: The same on the disk.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self._folder = url.rstrip("/"), folder

    def push(self, name: str) -> None:
        """Brings a published checkpoint into the store, and removes those that are no longer on the disk.

        Its state.json comes last: what has none is no checkpoint.

        Raises:
            StageError: the store cannot be reached.
        """
        here, there = self._folder / "checkpoints" / name, f"{self.url}/checkpoints/{name}"
        try:
            for file in sorted(here.iterdir(), key=lambda file: file.name == STATE):
                stage(str(file), there)
        except StageError as error:
            raise StageError(f"it is whole in {here}, and not in {self.url}: {error}") from error
        try:
            fs, path = url_to_fs(f"{self.url}/checkpoints")
            fs.invalidate_cache()
            staying = {folder.name for folder in checkpoints_in(self._folder / "checkpoints")}
            for other in (entry.rstrip("/") for entry in fs.ls(path, detail=False)):
                if (own := other.rpartition("/")[2]).startswith("step-") and own not in staying:
                    fs.rm(other, recursive=True)
        except Exception as error:
            raise StageError(f"{self.url} cannot be cleared up: {type(error).__name__}: {error}") from error

    def push_files(self) -> None:
        """Brings the records of the run into the store.

        Raises:
            StageError: the store cannot be reached.
        """
        for file in (self._folder / name for name in _FILES):
            if file.exists():
                stage(str(file), self.url)

    def pull(self) -> None:
        """Brings the newest checkpoint and the records from the store, unless they are on the disk.

        Raises:
            InputError: there is no checkpoint in the store.
            StageError: the store cannot be reached.
        """
        try:
            fs, path = url_to_fs(f"{self.url}/checkpoints")
            found = sorted(str(entry).rstrip("/") for entry in fs.ls(path, detail=False))
            whole = [entry for entry in found if "/step-" in entry and fs.exists(f"{entry}/{STATE}")]
        except FileNotFoundError:
            whole = []
        except (ImportError, ValueError) as error:
            raise InputError(f"{self.url} cannot be opened: {error}") from None
        if not whole:
            raise InputError(f"there is no checkpoint in {self.url}")
        name = whole[-1].rpartition("/")[2]
        if not (self._folder / "checkpoints" / name / STATE).exists():
            draft = self._folder / "checkpoints" / f".{name}.pulled"
            stage(f"{self.url}/checkpoints/{name}", str(draft))
            (draft / ".unisono-stage.json").unlink()
            draft.replace(self._folder / "checkpoints" / name)
        for file in _FILES:
            if not (self._folder / file).exists() and fs.exists(f"{path.rpartition('/')[0]}/{file}"):
                stage(f"{self.url}/{file}", str(self._folder))
