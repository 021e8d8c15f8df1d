"""Compiled: a forward as `torch.compile` makes it, in a way that no number of processes can show in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.errors import InputError
from unisono.strategy.wrapped import Wrapped

# Kernels of one function, one for each shape. As many as torch takes at all.
_MOST = 256


class Compiled(Wrapped):
    """Compiles a module's forward when it is first called in training, and again for every other shape.

    What makes no gradients runs uncompiled: a text that grows by a token at a time would have hundreds of shapes.

    Never for shapes in general: torch's default does so as soon as it meets a second shape, and which shapes a rank
    meets, and in what order, depends on the number of ranks. For the same reason what cannot be compiled any more is
    an error, where torch would go on uncompiled, and kernels are not chosen by measuring them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        if self._function is None:
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            self._function = torch.compile(  # type: ignore[call-overload]  # recompile_limit is in no overload
                self.__wrapped__,
                dynamic=False,
                recompile_limit=_MOST,
                # Dropout as it falls uncompiled, so that the two differ by rounding only.
                options={"deterministic": True, "fallback_random": True},
            )
        try:
            return self._function(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise InputError(
                f"{type(self.module).__name__} would have to be compiled more than {_MOST} times, once for every shape "
                "of its input: pad batches to a few lengths, or leave compile out"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        # Copies compile themselves, which costs little: torch finds the code of the original.
        return {**self.__dict__, "_function": None}


def check_compiler() -> None:
    """Checks that torch will find a C++ compiler.

    Raises:
        InputError: it will not.
    """
    # Seconds to import, so only where somebody compiles.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):  # the latter where CXX names what cannot be run
        raise InputError(
            "compile needs a C++ compiler and torch finds none on this machine: install g++, or name one in the "
            "environment variable CXX, or leave compile out"
        ) from None
