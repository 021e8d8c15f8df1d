"""Landing: backward's gradients are laid out one by one, each while it is still in the processor's cache.

The parameter's gradient is then where it was copied to, so what is done to it before `optimizer.step()` counts. What a
second `backward()`, or the user, puts there anew is copied when the step takes the gradients in, as without this.
Measured with 23 MB of gradients, 2 ranks on 2 cores: 2 to 4 ms instead of 8, see docs/design/0008.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from unisono.strategy.flat import FlatBuffer, FlatGroup

LEAST_BYTES = 1024 * 1024  # below, one call for all gradients is cheaper than one a parameter


class Landing:
    """See the module's docstring.

    Args:
        group: Whose gradients.
    """

    def __init__(self, group: FlatGroup) -> None:
        self._group = group
        self._target: FlatBuffer | None = None
        self._open = False
        self._landed: set[int] = set()

    def hooks(self) -> list[RemovableHandle]:
        """Hangs a hook on every parameter, where that pays."""
        group = self._group
        if group.device.type != "cpu" or group.num_bytes < LEAST_BYTES:
            return []
        return [
            param.register_post_accumulate_grad_hook(self._hook(position))  # type: ignore[no-untyped-call]
            for position, param in enumerate(group.params)
            if param.is_leaf and param.requires_grad
        ]

    def _hook(self, position: int) -> Callable[[torch.Tensor], None]:
        def land(param: torch.Tensor) -> None:
            if not self._open or position in self._landed:
                return
            grad = param.grad
            if grad is None or grad.requires_grad or grad.layout is not torch.strided:
                return
            if self._target is None:
                self._target = self._group.buffer()
            self._landed.add(position)
            param.grad = self._target.views[position].copy_(grad)

        return land

    def open(self, leaf: int) -> None:
        """Before the forward of `leaf`; what would be added to its neighbour anyway needs no place of its own."""
        self._landed.clear()
        self._open = self._group.tree.sibling_of(leaf) is None

    def take(self) -> FlatBuffer | None:
        """Ends it; returns where gradients are, if any are."""
        self._open = False
        target, self._target = self._target, None
        if target is not None:
            memory = target.flat.untyped_storage().data_ptr()
            for param, view in zip(self._group.params, target.views.values(), strict=True):
                grad = param.grad
                if grad is None or grad is view or grad.layout is not torch.strided:
                    continue
                if grad.untyped_storage().data_ptr() == memory:  # another parameter's, whose place is written to next
                    param.grad = grad.clone()
        return target
