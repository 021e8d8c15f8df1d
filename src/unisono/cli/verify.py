"""`unisono verify`: the contract, proved on your own recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from unisono.cli.options import NumWorkers, RecipeSource, Settings, check_counts
from unisono.errors import InputError
from unisono.execution import Execution


def verify(
    recipe: RecipeSource = "stdlib-gpt",
    worlds: Annotated[str, typer.Option(help="Numbers of processes, with commas.")] = "1,2,3,4",
    strategies: Annotated[str, typer.Option(help="Strategies, with commas, or all.")] = "all",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 20,
    set_: Settings = None,
    num_workers: NumWorkers = None,
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
    check_counts(num_workers)
    if numbers[0] < 1:
        raise InputError(f"--worlds {worlds}: a run needs at least one process")
    if steps < 1:
        raise InputError(f"--steps {steps}: at least one step is needed to compare anything")
    how = Execution(num_workers=num_workers)
    job = RecipeJob(source=recipe, settings=parse_settings(set_ or []), steps=steps, how=how)
    raise typer.Exit(start(job, numbers, strategies, as_json=json))
