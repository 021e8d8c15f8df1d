"""Mixed: a forward in bfloat16 where that is enough, with float32 weights, gradients and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.data.tensors import map_tensors
from unisono.forward.wrapped import Wrapped

_LOW = (torch.bfloat16, torch.float16)


class Mixed(Wrapped):
    """Runs a model's forward under autocast, and casts what it returns to float32, for a loss outside of it.

    Autocast's cache of cast weights is off. It would hold a copy of every weight until the forward ends, those of
    blocks whose activations are recomputed, or whose weights are sharded, too; and the gradients of a weight that is
    used twice would be added in bfloat16. A weight that is used n times in a forward is cast n times instead.

    Args:
        module: A model.
        device_type: Where it runs.
    """

    def __init__(self, module: nn.Module, device_type: str) -> None:
        super().__init__(module)
        self._device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, torch.bfloat16, cache_enabled=False):
            output = self.__wrapped__(*args, **kwargs)
        return map_tensors(lambda tensor: tensor.float() if tensor.dtype in _LOW else tensor, output)
