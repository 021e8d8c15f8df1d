"""Recomputed: a block that keeps only its inputs for the backward pass, and runs its forward a second time there.

(Activation checkpointing: Chen et al. 2016.) The second forward must be the first once more, bit for bit, and leave
nothing behind. torch's `checkpoint` sees to torch's generators and to autocast; `_Replay` to the rest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from unisono.errors import InputError
from unisono.strategy.wrapped import Wrapped

# As in `strategy/buffers.py`: up to this size a buffer is kept by value, beyond it watched by its version counter.
_KEPT_ELEMENTS = 16_384


class Recomputed(Wrapped):
    """See the module's docstring. Only where there will be a backward, and the module is in training mode."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function, names, count = self.__wrapped__, tuple(kwargs), len(args)
        if not (torch.is_grad_enabled() and self.module.training):
            return function(*args, **kwargs)

        def call(*values: Any) -> Any:
            return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            replay = _Replay(self.module, (*args, *kwargs.values()))
            return replay.first(), replay

        # All by position: `checkpoint` looks there, and there only, for the device whose generator it keeps.
        return checkpoint(
            call, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True, context_fn=contexts
        )


class _Replay:
    """A context in which a module's forward meets what it met at first; what it then changes is put back.

    It takes private copies of the module's buffers: running statistics would be updated twice, and a spectral norm
    would go on from where the first forward left it. The live ones are taken away meanwhile and not written to, since
    autograd may hold on to them. Can be entered again, by a second backward through the same graph.

    Args:
        module: Which is about to run for the first time.
        inputs: Its arguments.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Any]) -> None:
        self._module = module
        self._generators = random.getstate(), np.random.get_state()
        self._homes = [part._buffers for part in module.modules() if part._buffers]
        self._before = [dict(home) for home in self._homes]
        tensors = {id(value): value for home in self._homes for value in home.values() if value is not None}
        self._kept = {key: value.detach().clone() for key, value in tensors.items() if _is_small(value)}
        large = [value for key, value in tensors.items() if key not in self._kept and not is_lazy(value)]
        given = [value for value in inputs if isinstance(value, torch.Tensor) and not value.is_inference()]
        self._watched = [(value, value._version) for value in (*large, *given)]

    @contextmanager
    def first(self) -> Iterator[None]:
        """The first forward runs inside.

        Raises:
            InputError: it wrote to what the second cannot be given as it was.
        """
        yield
        for value, version in self._watched:
            if value._version != version:
                names = [name for name, buffer in self._module.named_buffers() if buffer is value]
                what = f"buffer {names[0]} (more than {_KEPT_ELEMENTS} elements)" if names else "input"
                raise InputError(
                    f"recompute runs {type(self._module).__name__} twice, and it writes to its {what}: let it write to "
                    "a new tensor, or leave recompute out"
                )

    def __enter__(self) -> None:
        self._outside = random.getstate(), np.random.get_state(), [dict(home) for home in self._homes]
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])
        copies = {key: value.clone() for key, value in self._kept.items()}
        for home, before in zip(self._homes, self._before, strict=True):
            _fill(home, {key: copies.get(id(value), value) for key, value in before.items()})

    def __exit__(self, *error: object) -> None:
        python_state, numpy_state, buffers = self._outside
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for home, outside in zip(self._homes, buffers, strict=True):
            _fill(home, outside)


def _is_small(value: torch.Tensor) -> bool:
    return not is_lazy(value) and value.numel() <= _KEPT_ELEMENTS


def _fill(home: dict[str, Any], content: dict[str, Any]) -> None:
    home.clear()
    home.update(content)
