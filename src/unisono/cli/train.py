"""`unisono train`: train a recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from unisono.cli import options


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(help="A Python file with `recipe(**options)`, or a built-in. Default: stdlib-gpt."),
    ] = None,
    nproc: options.Nproc = None,
    nnodes: options.Nnodes = None,
    rdzv: options.Rdzv = None,
    set_: options.Settings = None,
    steps: Annotated[int | None, typer.Option(help="End after this many optimizer steps.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Folder of the run. Default: runs/NAME-TIME.")] = None,
    num_workers: options.NumWorkers = None,
    strategy: options.StrategyName = None,
    shard_size: options.ShardSize = None,
    offload: options.OffloadTo = None,
    offload_dir: options.OffloadDir = None,
    precision: options.Precision = None,
    compile: options.Compile = None,
    recompute: options.Recompute = None,
    transport: options.Transport = None,
    checkpoint_every: options.CheckpointEvery = None,
    snapshot_every: options.SnapshotEvery = None,
    keep: options.Keep = None,
    keep_best: options.KeepBest = None,
    resume: options.Resume = None,
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Go on although the recipe has changed since.")
    ] = False,
    init_from: Annotated[
        str | None, typer.Option(metavar="FILE", help="Begin with the weights of a safetensors file.")
    ] = None,
    max_restarts: options.MaxRestarts = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on standard output.")] = False,
    debug: options.Debug = False,
) -> None:
    """Train a recipe: the same weights, bit for bit, on any number of processes."""
    options.check_counts(num_workers)
    # Only now torch: help and slips of the keyboard should not wait for it.
    from unisono.cli.settings import parse_settings
    from unisono.cli.training import start

    settings = parse_settings(set_ or [])
    given = options.given(
        nproc=nproc,
        nnodes=nnodes,
        rdzv=rdzv,
        run_dir=run_dir,
        num_workers=num_workers,
        strategy=strategy,
        shard_size=shard_size,
        offload=offload,
        offload_dir=offload_dir,
        recompute=recompute,
        transport=transport,
        checkpoint_every=checkpoint_every,
        snapshot_every=snapshot_every,
        keep=keep,
        keep_best=keep_best,
        resume=resume,
        allow_changed=allow_changed or None,
        max_restarts=max_restarts,
    )
    asked = options.given(
        source=recipe,
        settings=settings or None,
        steps=steps,
        precision=precision,
        compile=compile,
        init_from=init_from,
    )
    start(asked, given, as_json=json, debug=debug)
