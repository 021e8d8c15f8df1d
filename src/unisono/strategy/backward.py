"""Backward: from a micro-batch's loss to gradients in the parameters."""

from __future__ import annotations

import math
from typing import Any

import torch

from unisono.errors import InputError
from unisono.strategy.loss_scale import LossScale


def check_loss(loss: Any, where: str) -> None:
    """Checks that a loss can be differentiated.

    Raises:
        InputError: it is no scalar, or needs no gradient.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        kind = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InputError(f"the loss in {where} must be a scalar tensor, got {kind}: return its mean")
    if not loss.requires_grad:
        raise InputError(f"the loss in {where} needs no gradient: compute it from the model's output, undetached")


def check_finite(loss: torch.Tensor, where: str, steps: int) -> None:
    """Checks that a loss is a number; waits for the device.

    Raises:
        InputError: it is not.
    """
    if not math.isfinite(loss.item()):
        kept = f"those after {steps} step{'s' * (steps > 1)}" if steps else "the initial ones"
        raise InputError(f"the loss in {where} is {loss.item()}; the weights are still {kept}")


def backward(loss: torch.Tensor, loss_scale: LossScale | None) -> None:
    """`loss.backward()`, of the scaled loss where there is a scale."""
    loss = loss.reshape(())
    if loss_scale is None:
        torch.autograd.backward(loss)
        return
    with loss_scale.applied():
        torch.autograd.backward(loss * loss_scale.value)
