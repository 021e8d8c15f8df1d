"""Compilation, with dynamo alone, since kernels take seconds each; those are in tests/multiproc/test_compiled.py."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.forwards import Net, Plain, apply, batch, seed
from unisono.errors import InputError
from unisono.forward import compiled
from unisono.forward.compiled import Compiled
from unisono.forward.mixed import Mixed
from unisono.forward.options import ForwardOptions
from unisono.forward.recomputed import Recomputed

# torch hides this one from itself by a filter, which cannot help where warnings are errors.
TRACING = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch._dynamo

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):
        yield


@TRACING
@pytest.mark.usefixtures("_traced_only")
def test_blocks_are_compiled_inside_of_what_recomputes_them() -> None:
    model, plain = Net(Plain), Net(Plain)
    plain.load_state_dict(model.state_dict())
    notes = apply(model, compile=True, recompute=True, precision="bf16-mixed")
    apply(plain, precision="bf16-mixed")
    assert notes[0] == "compile: 3 blocks (blocks.0 ... blocks.2), once for every shape"
    outer = model.blocks[0].__dict__["forward"]
    assert isinstance(outer, Recomputed) and isinstance(outer.__wrapped__, Compiled)
    assert isinstance(model.__dict__["forward"], Mixed) and not Compiled.is_on(model)
    losses = []
    for one in (model, plain, copy.deepcopy(model)):
        seed()
        losses.append(one(batch()).sum())
        losses[-1].backward()
    assert losses[0] == losses[1] == losses[2]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@TRACING
@pytest.mark.usefixtures("_traced_only")
def test_a_model_without_blocks_is_compiled_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert apply(model, compile=True) == ["compile: the whole model, once for every shape"]
    assert Compiled.is_on(model)
    assert model(batch()).shape == (6, 4)
    with pytest.raises(InputError, match=r"^zero3 gathers weights in the midst of a model that has no repeated blocks"):
        ForwardOptions(compile=True).apply(nn.Linear(4, 4), "cpu", hooks_inside=True, on_note=print)


@TRACING
@pytest.mark.usefixtures("_traced_only")
def test_too_many_shapes_are_an_error_and_no_uncompiled_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_MOST", 2)
    model = Plain()
    apply(model, compile=True)
    for n in (1, 2, 2, 1):
        model(torch.ones(n, 16))
    with torch.no_grad():
        for n in range(1, 9):  # a text that grows, say
            model(torch.ones(n, 16))
    with pytest.raises(InputError, match=r"^Plain would have to be compiled more than 2 times, once for every shape "):
        model(torch.ones(3, 16))


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.cpp_builder as builder

    compiled.check_compiler()
    builder.get_cpp_compiler()
    for function in (builder.get_cpp_compiler, builder.cpp_compiler_search):
        getattr(function, "cache_clear", lambda: None)()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match=r"^compile needs a C\+\+ compiler and torch finds none on this machine: "):
        compiled.check_compiler()
