"""`unisono checkpoint`: look at checkpoints, check them, compare them, take them along."""

from __future__ import annotations

import json as json_module
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from unisono.checkpoint.reader import Checkpoint

app = typer.Typer(help="Look at checkpoints, check them, compare them, take them along.", no_args_is_help=True)

Place = Annotated[
    str, typer.Argument(metavar="PATH", help="A run's folder, or one checkpoint: then the newest counts.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


@app.command()
def ls(path: Place, json: AsJson = False) -> None:
    """List the checkpoints of a run: steps, sizes, metrics."""
    from unisono.checkpoint.looking import rows
    from unisono.checkpoint.reader import find

    found = rows(find(Path(path))[1])
    if json:
        print(json_module.dumps(found))
        return
    table = _table("checkpoint", "epoch", "samples", "size", "loss", "metrics", "saved by", "at")
    for row in found:
        if "error" in row:
            table.add_row(row["name"], row["error"])
            continue
        by = row["saved_by"]
        table.add_row(
            row["name"],
            str(row["epoch"]),
            f"{row['samples']:,}",
            _size(row["bytes"]),
            "" if row["loss"] is None else f"{row['loss']:.4f}",
            "  ".join(f"{name} {value:.4f}" for name, value in row["metrics"].items()),
            f"{by['nproc']} x {by['strategy']}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(by["time"])),
        )
    _print(table)


@app.command()
def show(path: Place, json: AsJson = False) -> None:
    """Show what a checkpoint holds: its state, and each tensor's name, type and shape."""
    from unisono.checkpoint.looking import tensors

    found = _newest(path)
    listed = tensors(found)
    if json:
        print(json_module.dumps({"folder": str(found.folder), "state": found.state, "tensors": listed}))
        return
    table = _table("file", "tensor", "dtype", "shape", "size")
    for row in listed:
        shape = "x".join(map(str, row["shape"])) or "()"
        table.add_row(row["file"], row["name"], row["dtype"], shape, _size(row["bytes"]))
    print(f"{found.folder}: step {found.step}, {_size(found.num_bytes)}")
    _print(table)


@app.command()
def verify(path: Place, json: AsJson = False) -> None:
    """Compare all checksums with what is on the disk; exit code 1 if a checkpoint is damaged."""
    from unisono.checkpoint.reader import Checkpoint, DamagedError, find

    found: list[dict[str, Any]] = []
    for folder in find(Path(path))[1]:
        try:
            Checkpoint.open(folder).check()
            found.append({"name": folder.name, "whole": True})
        except DamagedError as error:
            found.append({"name": folder.name, "whole": False, "error": str(error)})
    if json:
        print(json_module.dumps(found))
    else:
        for row in found:
            print(f"{row['name']}: {'whole' if row['whole'] else row['error']}")
    raise typer.Exit(0 if all(row["whole"] for row in found) else 1)


@app.command()
def diff(one: Place, other: Place, json: AsJson = False) -> None:
    """Compare two checkpoints tensor by tensor, in units of the last place; exit code 1 if they differ."""
    from dataclasses import asdict

    from unisono.checkpoint.looking import differences

    changes = differences(_newest(one), _newest(other))
    if json:
        print(json_module.dumps([asdict(change) for change in changes]))
    elif changes:
        table = _table("file", "tensor", "what", "elements", "ulps")
        for change in changes:
            table.add_row(change.file, change.name, change.what, f"{change.elements:,}", f"{change.ulps:,}")
        _print(table)
    else:
        print("the same, to the last bit")
    raise typer.Exit(1 if changes else 0)


@app.command()
def export(path: Place, target: Annotated[str, typer.Argument(help="A folder, or a file .pt, .pth or .bin.")]) -> None:
    """Copy the weights: into a folder as Hugging Face has it, or into a file for `torch.load`."""
    from unisono.checkpoint.looking import export as export_to

    print(export_to(_newest(path), Path(target)))


def _newest(path: str) -> Checkpoint:
    from unisono.checkpoint.reader import Checkpoint, find

    return Checkpoint.open(find(Path(path))[1][-1])


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)


def _size(num_bytes: int) -> str:
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
