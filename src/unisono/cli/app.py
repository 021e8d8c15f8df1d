"""`unisono`: the commands, and how errors leave the program."""

from __future__ import annotations

import sys
import traceback

import typer

from unisono.cli.bench import bench
from unisono.cli.checkpoint import app as checkpoint
from unisono.cli.doctor import doctor
from unisono.cli.run import run
from unisono.cli.stage import stage
from unisono.cli.train import train
from unisono.cli.verify import verify
from unisono.errors import UnisonoError
from unisono.launch.failure import describe, own_traceback

app = typer.Typer(
    name="unisono",
    help="Data-parallel training in PyTorch where the recipe, not the machine, defines the run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(verify)
app.command()(stage)
app.command()(bench)
app.command()(doctor)
app.add_typer(checkpoint, name="checkpoint")
app.command(context_settings={"allow_interspersed_args": False})(run)


def main() -> None:
    """Runs the command line. Exit codes: 0 done, 1 the run failed, 2 wrong input, 130 interrupted."""
    try:
        app()
    except UnisonoError as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        print(f"unisono: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:  # the user's own, at one process
        print(f"{own_traceback(error).rstrip()}\n\nunisono: error: {describe(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("unisono: interrupted", file=sys.stderr)
        sys.exit(130)
