"""Wrapped: what stands in place of a module's `forward`, with the original inside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class Wrapped(ABC):
    """Takes the place of a module's `forward`, in the module's own `__dict__`.

    So the module stays the same object of the same class, with the same names and the same `state_dict`. Copies and
    pickles of the module have it too, bound to the copy. Hooks of the module, the user's and ours, run outside of it:
    once, and uncompiled.

    Args:
        module: Whose forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._earlier: Callable[..., Any] | None = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What was there before; under this name, since `inspect.signature` looks there."""
        if self._earlier is not None:
            return self._earlier
        # Looked up now: parametrizations change the class of a module.
        return MethodType(type(self.module).forward, self.module)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @classmethod
    def is_on(cls, module: nn.Module) -> bool:
        """Whether a module's forward is wrapped in one of this class already."""
        found = module.__dict__.get("forward")
        while isinstance(found, Wrapped):
            if isinstance(found, cls):
                return True
            found = found._earlier
        return False
