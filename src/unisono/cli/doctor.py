"""`unisono doctor`: what this machine has, and what will go wrong."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    run_dir: Annotated[str | None, typer.Argument(help="A run's folder: where do its ranks wait, and why?")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON on standard output.")] = False,
) -> None:
    """Look at this machine and say what will go wrong; or, given a run's folder, where its ranks are and what is wrong.

    Exit code 1: something is.
    """
    from unisono.cli.examining import show, show_ranks

    raise typer.Exit(show(as_json=json) if run_dir is None else show_ranks(run_dir, as_json=json))
