"""`unisono train`: train a recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from unisono.errors import InputError


def train(
    recipe: Annotated[
        str, typer.Argument(help="A Python file with `recipe(**options)`, or a built-in: stdlib-gpt, digits.")
    ] = "stdlib-gpt",
    nproc: Annotated[
        int | None, typer.Option(help="Processes. Default: one a GPU, or one a usable core where there is none.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the recipe; repeatable.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="End after this many optimizer steps.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Folder of the run. Default: runs/NAME-TIME.")] = None,
    num_workers: Annotated[
        int | None, typer.Option(help="Loader processes a rank; cannot show in the weights. Default: 0.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="ddp, zero1, zero2 or zero3: how ranks share the work. Default: ddp.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on standard output.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of wrong input too.")] = False,
) -> None:
    """Train a recipe: the same weights, bit for bit, on any number of processes."""
    if nproc is not None and nproc < 1:
        raise InputError(f"--nproc {nproc}: a run needs at least one process")
    if num_workers is not None and num_workers < 0:
        raise InputError(f"--num-workers {num_workers}: it must be 0 or more")
    # Only now torch: help and slips of the keyboard should not wait for it.
    from unisono.cli.settings import parse_settings
    from unisono.cli.training import start
    from unisono.cli.worker import RecipeJob

    settings = parse_settings(set_ or [])
    how = {"nproc": nproc, "num_workers": num_workers, "strategy": strategy, "run_dir": run_dir}
    given = {name: value for name, value in how.items() if value is not None}
    start(RecipeJob(source=recipe, settings=settings, steps=steps), given, as_json=json, debug=debug)
