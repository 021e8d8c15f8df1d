"""One exception tree. Every message says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnisonoError(Exception):
    """Base of every error that unisono raises on purpose. Exit code 1."""

    exit_code = 1


class InputError(UnisonoError):
    """The user's input is wrong: a recipe, an option, a dataset, a loss. Exit code 2, no traceback."""

    exit_code = 2


class CommError(UnisonoError):
    """A collective did not finish: a peer is gone, too late, or in another call.

    It is mostly the *consequence* of another rank's failure, so the launcher shows it last.
    """


class Interrupted(UnisonoError):
    """The run was stopped by SIGINT or SIGTERM after a whole step. Exit code 130."""

    exit_code = 130


def nearest(word: str, choices: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" for the closest choice, or an empty string."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" (did you mean '{found[0]}'?)" if found else ""


def require_positive_int(value: object, name: str, where: str = "") -> int:
    """Returns `value` if it is an int of at least 1.

    Raises:
        InputError: it is something else; the message names `name`, `where` and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a positive integer, got {value!r}{f' ({where})' if where else ''}")
    return value
