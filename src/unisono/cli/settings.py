"""`--set KEY=VALUE`."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.errors import InputError


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """Returns the options of a recipe by name, dashes as underscores.

    Raises:
        InputError: a pair is none.
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InputError(f"--set {pair}: write it as KEY=VALUE")
        found[key.replace("-", "_")] = value
    return found
