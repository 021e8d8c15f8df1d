"""Forwards in 16 bits: mixed with float32 weights, or all of it with weights that have 16 bits too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.data.tensors import map_tensors
from unisono.strategy.loss_scale import LossScale
from unisono.strategy.wrapped import Wrapped

_LOW = (torch.bfloat16, torch.float16)


class Mixed(Wrapped):
    """Runs a model's forward under autocast, and casts what it returns to float32, for a loss outside of it.

    Autocast's cache of cast weights is off. It would hold a copy of every weight until the forward ends, those of
    blocks whose activations are recomputed, or whose weights are sharded, too; and the gradients of a weight that is
    used twice would be added in 16 bits. A weight that is used n times in a forward is cast n times instead.

    Args:
        module: A model.
        device_type: Where it runs.
        dtype: Of what is cast.
        loss_scale: What the losses are multiplied by, for float16.
    """

    def __init__(
        self, module: nn.Module, device_type: str, dtype: torch.dtype, loss_scale: LossScale | None = None
    ) -> None:
        super().__init__(module)
        self._device_type, self._dtype, self._loss_scale = device_type, dtype, loss_scale

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, self._dtype, cache_enabled=False):
            output = self.__wrapped__(*args, **kwargs)
        return map_tensors(self._widened, output)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype in _LOW:
            tensor = tensor.float()
        if self._loss_scale is not None and tensor.requires_grad:
            tensor.register_hook(self._loss_scale.check_applied)  # type: ignore[no-untyped-call]
        return tensor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loss_scale": None}  # a copy of the model may train in a loop of its own


class Narrow(Wrapped):
    """Runs the forward of a model with bfloat16 weights: float32 inputs are cast, and outputs come in float32."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(lambda t: t.bfloat16() if t.dtype == torch.float32 else t, (args, kwargs))
        output = self.__wrapped__(*args, **kwargs)
        return map_tensors(lambda tensor: tensor.float() if tensor.dtype in _LOW else tensor, output)
