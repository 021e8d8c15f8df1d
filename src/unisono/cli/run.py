"""`unisono run`: a script of your own, on several processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.options import (
    Compile,
    Debug,
    Nproc,
    NumWorkers,
    OffloadDir,
    OffloadTo,
    Precision,
    Recompute,
    ShardSize,
    StrategyName,
    check_counts,
)
from unisono.errors import InputError


def run(
    script: Annotated[str, typer.Argument(help="A Python file that calls unisono.init().")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.")] = None,
    nproc: Nproc = None,
    run_dir: Annotated[str | None, typer.Option(help="Folder of the run. Default: runs/SCRIPT-TIME.")] = None,
    num_workers: NumWorkers = None,
    strategy: StrategyName = None,
    shard_size: ShardSize = None,
    offload: OffloadTo = None,
    offload_dir: OffloadDir = None,
    precision: Precision = None,
    compile: Compile = None,
    recompute: Recompute = None,
    debug: Debug = False,
) -> None:
    """Run your own training script on several processes. Options for unisono come before the file."""
    check_counts(nproc, num_workers)
    if not Path(script).is_file():
        raise InputError(f"script {script} does not exist")
    from unisono.cli.start import devices, launch_ranks, make_run_dir
    from unisono.forward.compiled import check_compiler
    from unisono.launch.elastic import Job
    from unisono.recipe import check_precision
    from unisono.strategy.catalog import strategy_name

    if strategy is not None:
        strategy = strategy_name(strategy)
    if precision is not None:
        check_precision(precision, "--precision")
    if compile:
        check_compiler()
    rest = list(arguments or [])
    if rest[:1] == ["--"]:
        rest = rest[1:]
    folder = make_run_dir(run_dir, Path(script).stem)
    given = {"num_workers": num_workers, "strategy": strategy, "shard_size": shard_size}
    given |= {"offload": offload, "offload_dir": offload_dir}
    given |= {"precision": precision, "compile": compile, "recompute": recompute}
    flags = {name: value for name, value in given.items() if value is not None}
    command = [sys.executable, "-m", "unisono.cli.worker", "script", script, *rest]
    nproc = nproc or devices()
    print(f"{script}: {nproc} process{'es' * (nproc > 1)}; {folder}", file=sys.stderr)
    launch_ranks(Job(command=command, nproc=nproc, run_dir=folder, flags=flags), debug)
