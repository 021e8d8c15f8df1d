"""`unisono verify`: the contract, proved on your own recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from unisono.errors import InputError


def verify(
    recipe: Annotated[
        str, typer.Argument(help="A Python file with `recipe(**options)`, or a built-in: stdlib-gpt, digits.")
    ] = "stdlib-gpt",
    worlds: Annotated[str, typer.Option(help="Numbers of processes, with commas.")] = "1,2,3,4",
    strategies: Annotated[str, typer.Option(help="Strategies, with commas, or all.")] = "all",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 20,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the recipe; repeatable.")
    ] = None,
    num_workers: Annotated[int, typer.Option(help="Loader processes a rank.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print everything found as JSON on standard output.")] = False,
) -> None:
    """Train a recipe on every number of processes, under every strategy, and compare the weights after every step."""
    from unisono.cli.settings import parse_settings
    from unisono.cli.verifying import start
    from unisono.cli.worker import RecipeJob

    try:
        numbers = sorted({int(number) for number in worlds.split(",")})
    except ValueError:
        raise InputError(f"--worlds {worlds}: give numbers of processes with commas, such as 1,2,4") from None
    if numbers[0] < 1:
        raise InputError(f"--worlds {worlds}: a run needs at least one process")
    if steps < 1:
        raise InputError(f"--steps {steps}: at least one step is needed to compare anything")
    job = RecipeJob(source=recipe, settings=parse_settings(set_ or []), steps=steps, num_workers=num_workers)
    raise typer.Exit(start(job, numbers, strategies, as_json=json))
