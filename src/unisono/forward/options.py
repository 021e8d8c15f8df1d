"""ForwardOptions: what was said of the forward, and how a model is made to follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from unisono.errors import InputError
from unisono.forward.compiled import Compiled
from unisono.forward.mixed import Mixed, Narrow
from unisono.forward.recomputed import Recomputed
from unisono.recipe import BF16, BF16_MIXED, FLOAT32, FP16_MIXED
from unisono.strategy.blocks import repeated_blocks
from unisono.strategy.loss_scale import LossScale

AUTOCAST = {BF16_MIXED: torch.bfloat16, FP16_MIXED: torch.float16}


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """How the forward of every model of a run is executed.

    Attributes:
        precision: One of `PRECISIONS`. Shows in the weights, so it belongs to the recipe.
        compile: Whether blocks, or a model without any, are compiled. Shows in the weights too.
        recompute: Whether blocks run their forward again instead of keeping activations. Cannot show.
    """

    precision: str = FLOAT32
    compile: bool = False
    recompute: bool = False

    def apply(
        self,
        model: nn.Module,
        device_type: str,
        *,
        hooks_inside: bool,
        loss_scale: LossScale | None = None,
        on_note: Callable[[str], None],
    ) -> None:
        """Wraps the forward of a model and of its blocks; a block that another model has brought is left alone.

        Args:
            model: Stays the same object, with the same names.
            device_type: Where it runs.
            hooks_inside: Whether modules that are in no block get hooks, which cannot be compiled.
            loss_scale: What losses are multiplied by, for float16.
            on_note: Called with a sentence for the user.

        Raises:
            InputError: this model cannot be run so.
        """
        if isinstance(model, torch.jit.ScriptModule) and (self.compile or self.precision != FLOAT32):
            what = "compile" if self.compile else f"precision {self.precision}"
            raise InputError(f"{what} does not work on a scripted model: pass the model itself to prepare")
        if is_compiled_already(model):
            on_note(
                "this model was compiled before prepare, and which kernels it gets depends on the shapes that a rank "
                "meets: where micro-batches differ in shape, the number of processes may show; use "
                "unisono.init(compile=True) instead"
            )
        blocks = composite_blocks(model) if self.compile or self.recompute else {}
        if self.compile:
            if not blocks and hooks_inside:
                raise InputError(
                    "zero3 gathers weights in the midst of a model that has no repeated blocks, so it cannot be "
                    "compiled: choose zero2, or leave compile out"
                )
            for module in blocks.values() if blocks else [model]:
                if not Compiled.is_on(module):
                    Compiled(module)
            on_note(f"compile: {_said(blocks) if blocks else 'the whole model'}, once for every shape")
        if self.recompute:
            for module in blocks.values():
                if not Recomputed.is_on(module):
                    Recomputed(module)
            nothing = "no module of the same class comes twice in a ModuleList or Sequential, so nothing is recomputed"
            on_note(f"recompute: {_said(blocks) if blocks else nothing}")
        if self.precision in AUTOCAST and not Mixed.is_on(model):
            Mixed(model, device_type, AUTOCAST[self.precision], loss_scale)
        elif self.precision == BF16 and not Narrow.is_on(model):
            Narrow(model)


EAGER = ForwardOptions()


def is_compiled_already(model: nn.Module) -> bool:
    """Whether a model is the result of `torch.compile(model)`, or of `model.compile()`."""
    return "_orig_mod" in model._modules or model.__dict__.get("_compiled_call_impl") is not None


def composite_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the repeated blocks of a model by name, but for single layers of torch and scripted modules.

    A single layer keeps little but its input, which its recomputation would have to keep too.
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks = [block for block in repeated_blocks(model) if not isinstance(block, torch.jit.ScriptModule)]
    return {names[id(block)]: block for block in blocks if any(True for _ in block.children()) or not _is_torchs(block)}


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _said(blocks: dict[str, nn.Module]) -> str:
    names = list(blocks)
    return names[0] if len(names) == 1 else f"{len(names)} blocks ({names[0]} ... {names[-1]})"
