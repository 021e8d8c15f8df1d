"""`unisono stage`: bring data near."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from unisono.errors import InputError


def stage(
    source: Annotated[str, typer.Argument(help="A file or folder: a path, s3://, gs://, https://, memory:// ...")],
    target: Annotated[str, typer.Argument(help="A folder, likewise.")],
    workers: Annotated[int, typer.Option(help="Pieces under way at once.")] = 8,
    json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Copy data from or to an object store: many pieces at once, checked; the same command goes on where it stopped."""
    if workers < 1:
        raise InputError(f"--workers {workers}: at least one is needed")
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from unisono.data.stage import stage as copy

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=None)
        report = copy(
            source,
            target,
            workers=workers,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if json:
        print(json_module.dumps(asdict(report)))
        return
    print(
        f"{report.files:,} files, {report.bytes:,} bytes in {target}; copied now: {report.copied_files:,} files, "
        f"{report.copied_bytes:,} bytes in {report.seconds:.1f} s"
    )
