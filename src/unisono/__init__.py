"""unisono: data-parallel training in PyTorch where the recipe, not the machine, defines the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.checkpoint.writer import CheckpointError
    from unisono.comm.backend import register_backend
    from unisono.data.stage import StageError, stage
    from unisono.errors import CommError, InputError, UnisonoError
    from unisono.numerics.digest import weights_digest
    from unisono.opening import init
    from unisono.recipe import Recipe
    from unisono.run import Run
    from unisono.trainer import Trainer

__all__ = [
    "CheckpointError",
    "CommError",
    "InputError",
    "Recipe",
    "Run",
    "StageError",
    "Trainer",
    "UnisonoError",
    "init",
    "register_backend",
    "stage",
    "weights_digest",
]

_HOMES = {
    "CheckpointError": "checkpoint.writer",
    "CommError": "errors",
    "InputError": "errors",
    "Recipe": "recipe",
    "Run": "run",
    "StageError": "data.stage",
    "Trainer": "trainer",
    "UnisonoError": "errors",
    "init": "opening",
    "register_backend": "comm.backend",
    "stage": "data.stage",
    "weights_digest": "numerics.digest",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `unisono --help` need not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"unisono.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
