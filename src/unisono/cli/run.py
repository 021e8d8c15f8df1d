"""`unisono run`: a script of your own, on several processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from unisono.errors import InputError


def run(
    script: Annotated[str, typer.Argument(help="A Python file that calls unisono.init().")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.")] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes. Default: one a GPU, or one a usable core where there is none.")
    ] = None,
    run_dir: Annotated[str | None, typer.Option(help="Folder of the run. Default: runs/SCRIPT-TIME.")] = None,
    num_workers: Annotated[int | None, typer.Option(help="Loader processes a rank; wins over the script's.")] = None,
    strategy: Annotated[str | None, typer.Option(help="ddp, zero1, zero2 or zero3; wins over the script's.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of wrong input too.")] = False,
) -> None:
    """Run your own training script on several processes. Options for unisono come before the file."""
    if nproc is not None and nproc < 1:
        raise InputError(f"--nproc {nproc}: a run needs at least one process")
    if num_workers is not None and num_workers < 0:
        raise InputError(f"--num-workers {num_workers}: it must be 0 or more")
    if not Path(script).is_file():
        raise InputError(f"script {script} does not exist")
    from unisono.cli.start import devices, launch_ranks, make_run_dir
    from unisono.launch.elastic import Job
    from unisono.strategy.catalog import strategy_name

    if strategy is not None:
        strategy = strategy_name(strategy)
    rest = list(arguments or [])
    if rest[:1] == ["--"]:
        rest = rest[1:]
    folder = make_run_dir(run_dir, Path(script).stem)
    flags = {k: v for k, v in {"num_workers": num_workers, "strategy": strategy}.items() if v is not None}
    command = [sys.executable, "-m", "unisono.cli.worker", "script", script, *rest]
    nproc = nproc or devices()
    print(f"{script}: {nproc} process{'es' * (nproc > 1)}; {folder}", file=sys.stderr)
    launch_ranks(Job(command=command, nproc=nproc, run_dir=folder, flags=flags), debug)
