"""Replicas: copies of the models on further devices of one process, for `dp`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from unisono.data.tensors import map_tensors
from unisono.strategy.wrapped import Wrapped


def add_gradient(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Adds a gradient that may be on another device."""
    if grad is not None:
        grad = grad.to(param.device)
        param.grad = grad if param.grad is None else param.grad + grad


class Replicas:
    """See the module's docstring.

    Args:
        devices: All of them, the models' own first; one, or none, for no copies.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._models: list[Scattered] = []
        self._chosen = 0

    def attach(self, models: Sequence[nn.Module]) -> None:
        """Gets between the models and their callers."""
        if len(self._devices) > 1:
            self._models = [Scattered(model, self._devices) for model in models]

    def begin_step(self) -> None:
        """Told that weights have changed."""
        for model in self._models:
            model.current.clear()

    def choose(self, turn: int) -> None:
        """Says on which device the next forward runs."""
        self._chosen = turn % max(1, len(self._devices))
        for model in self._models:
            model.chosen = self._chosen

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each parameter with its copy where the last forward ran; none if that was the model's own device."""
        return [pair for model in self._models for pair in model.pairs(self._chosen)]

    def bring_gradients(self) -> None:
        """Adds what a plain `loss.backward()` left in copies to the gradients of the models' own parameters."""
        for param, other in self.pairs():
            add_gradient(param, other.grad)
            other.grad = None


class Scattered(Wrapped):
    """Runs a model's forward on the device that was chosen, by the copy there; what it returns comes back.

    Args:
        module: A model.
        devices: Its own, and those of its copies.

    Attributes:
        chosen: Which of the devices.
        current: The copies that have the model's weights.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__(module)
        self._devices, self.chosen = devices, 0
        self._copies: dict[int, nn.Module] = {}  # made when they are first needed
        self.current: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.chosen == 0 or not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        number, device = self.chosen, self._devices[self.chosen]
        if number not in self._copies:
            self._copies[number] = copy.deepcopy(self.module).to(device)
        replica = self._copies[number]
        self._tell(replica, number)
        args, kwargs = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))
        output = replica(*args, **kwargs)
        # Whatever changed: `F.batch_norm` does not count its updates.
        _hang_copies(replica, self.module, self._devices[0])
        return map_tensors(lambda tensor: tensor.to(self._devices[0]), output)

    @torch.no_grad()
    def _tell(self, replica: nn.Module, number: int) -> None:
        """Brings a copy to the state of the model."""
        for own, other in zip(self.module.modules(), replica.modules(), strict=True):
            other.training = own.training
        _hang_copies(self.module, replica, self._devices[number])
        for param, its in self.pairs(number):
            its.requires_grad_(param.requires_grad)
            if number not in self.current:
                its.copy_(param, non_blocking=True)
        self.current.add(number)

    def pairs(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each parameter with that of a copy; none if there is no such copy."""
        if number not in self._copies:
            return []
        return list(zip(self.module.parameters(), self._copies[number].parameters(), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model runs where it is.
        return {**self.__dict__, "chosen": 0, "_copies": {}, "current": set()}


@torch.no_grad()
def _hang_copies(source: nn.Module, target: nn.Module, device: torch.device) -> None:
    """Gives a model the buffers of another, as new tensors: an earlier forward's graph may hold on to the old."""
    copies: dict[int, torch.Tensor] = {}  # one that two modules share stays one
    for own, other in zip(source.modules(), target.modules(), strict=True):
        for key, value in own._buffers.items():
            if value is not None and id(value) not in copies:
                copies[id(value)] = value.detach().to(device, copy=True)
            other._buffers[key] = None if value is None else copies[id(value)]
