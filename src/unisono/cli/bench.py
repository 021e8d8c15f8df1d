"""`unisono bench`: this machine, ours beside what a user would pick instead."""

from __future__ import annotations

from typing import Annotated

import typer

from unisono.errors import InputError


def bench(
    workload: Annotated[str, typer.Option(help="tiny, mlp, gpt, cnn, wide; several by commas, or all.")] = "all",
    nproc: Annotated[int, typer.Option(help="Processes of each system.")] = 2,
    peers: Annotated[
        str,
        typer.Option(help="Of accelerate, fabric, deepspeed-0 to deepspeed-3 by commas; auto: those installed; none."),
    ] = "auto",
    systems: Annotated[
        str | None, typer.Option(help="Exactly these systems, by commas, instead of all of ours, torch's and --peers.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each has its turn.")] = 7,
    picture: Annotated[str | None, typer.Option(metavar="FILE", help="Draws bars too, as SVG.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON on standard output.")] = False,
) -> None:
    """Measure a step: ours beside raw DDP, FSDP2 and others, in turn, as a ratio to one without communication."""
    if nproc < 1 or rounds < 1:
        raise InputError(f"--nproc {nproc} --rounds {rounds}: both must be at least 1")
    from unisono.cli.benching import compare

    compare(workload, nproc, peers, systems, rounds, picture, as_json=json)
