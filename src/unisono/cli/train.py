"""`unisono train`: train a recipe."""

from __future__ import annotations

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
    RecipeSource,
    Recompute,
    Settings,
    ShardSize,
    StrategyName,
    check_counts,
)


def train(
    recipe: RecipeSource = "stdlib-gpt",
    nproc: Nproc = None,
    set_: Settings = None,
    steps: Annotated[int | None, typer.Option(help="End after this many optimizer steps.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Folder of the run. Default: runs/NAME-TIME.")] = None,
    num_workers: NumWorkers = None,
    strategy: StrategyName = None,
    shard_size: ShardSize = None,
    offload: OffloadTo = None,
    offload_dir: OffloadDir = None,
    precision: Precision = None,
    compile: Compile = None,
    recompute: Recompute = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on standard output.")] = False,
    debug: Debug = False,
) -> None:
    """Train a recipe: the same weights, bit for bit, on any number of processes."""
    check_counts(nproc, num_workers)
    # Only now torch: help and slips of the keyboard should not wait for it.
    from unisono.cli.settings import parse_settings
    from unisono.cli.training import start
    from unisono.cli.worker import RecipeJob

    settings = parse_settings(set_ or [])
    how = {"nproc": nproc, "num_workers": num_workers, "strategy": strategy, "shard_size": shard_size}
    how |= {"offload": offload, "offload_dir": offload_dir, "recompute": recompute, "run_dir": run_dir}
    given = {name: value for name, value in how.items() if value is not None}
    job = RecipeJob(source=recipe, settings=settings, steps=steps, precision=precision, compile=compile)
    start(job, given, as_json=json, debug=debug)
