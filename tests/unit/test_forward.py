"""What stands in place of a module's forward, and bfloat16 inside of it."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.forwards import Net, Plain, apply, batch
from unisono.errors import InputError
from unisono.forward.options import composite_blocks
from unisono.forward.recomputed import Recomputed
from unisono.strategy.wrapped import Wrapped


@pytest.mark.parametrize("options", [{"precision": "bf16-mixed"}, {"recompute": True}, {"compile": True}], ids=str)
def test_the_model_stays_what_it_is(options: dict[str, Any]) -> None:
    model, plain = Net(Plain), Net(Plain)
    names = list(model.state_dict())
    apply(model, **options)
    assert type(model) is Net
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert inspect.signature(model.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)
    plain.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_and_pickles_run_on_their_own_weights(how: Any) -> None:
    model = Net(Plain).eval()
    apply(model, precision="bf16-mixed", recompute=True)
    twin = how(model)
    assert torch.equal(twin(batch()), model(batch()))
    assert all(Recomputed.is_on(block) for block in twin.blocks)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(batch()).any()
    assert model(batch()).any()
    del model
    assert not twin(batch()).any()


def test_a_forward_of_the_users_own_is_kept() -> None:
    model = Plain()
    theirs = model.forward
    model.forward = lambda x: theirs(x) * 0 + 7  # type: ignore[method-assign]
    apply(model, precision="bf16-mixed")
    assert torch.equal(model(torch.ones(1, 16)), torch.full((1, 16), 7.0))


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Out:
    value: Any
    loss: float


class ModelOutput(OrderedDict[str, Any]):
    """As in Hugging Face: a mapping with attributes."""

    @property
    def logits(self) -> Any:
        return self["logits"]


CONTAINERS: dict[str, Any] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, [x]),
    "named": lambda x: Pair(x, {"deep": x}),
    "dataclass": lambda x: Out(x, 1.5),
    "mapping": lambda x: ModelOutput(logits=x, other=None),
}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    for item in [*items, *(vars(value).values() if isinstance(value, Out) else ())]:
        yield from tensors_in(item)


@pytest.mark.parametrize("container", CONTAINERS)
def test_low_precision_is_inside_and_float32_outside(container: str) -> None:
    seen = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.linear(x)
            seen.append(x.dtype)
            return CONTAINERS[container](x)

    model = Model()
    apply(model, precision="bf16-mixed")
    found = model(batch())
    expected = CONTAINERS[container](batch())
    assert seen == [torch.bfloat16]
    assert type(found) is type(expected)
    tensors = list(tensors_in(found))
    assert tensors and all(tensor.dtype == torch.float32 for tensor in tensors)
    sum(tensor.sum() for tensor in tensors).backward()  # type: ignore[union-attr]
    assert model.linear.weight.dtype == model.linear.weight.grad.dtype == torch.float32  # type: ignore[union-attr]


def test_what_is_no_low_precision_is_not_cast() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.double(), x.long(), x.bool(), x.half()

    model = Model()
    apply(model, precision="bf16-mixed")
    assert [x.dtype for x in model(batch())] == [torch.float64, torch.int64, torch.bool, torch.float32]


def test_gradients_of_a_weight_used_twice_are_added_in_float32() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + (x * 300) @ self.weight

    model = Twice()
    apply(model, precision="bf16-mixed")
    x = torch.ones(1, 4)
    model(x).sum().backward()
    # 1 + 300 is 301, of which bfloat16 has no idea: its neighbours there are 300 and 302.
    assert model.weight.grad is not None
    assert model.weight.grad.unique().tolist() == [301.0]


def stages() -> nn.Module:
    def stage(width: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Conv1d(width, width, 1), nn.ReLU()) for _ in range(2)))

    return nn.ModuleDict({"stem": nn.Conv1d(3, 4, 1), "one": stage(4), "two": stage(4), "head": nn.Linear(4, 2)})


def shared() -> nn.Module:
    block = Plain()
    return nn.Sequential(block, block, Plain())


BLOCKS: list[tuple[Any, list[str]]] = [
    (lambda: Net(Plain), ["blocks.0", "blocks.1", "blocks.2"]),
    (stages, ["one.0", "one.1", "two.0", "two.1"]),
    (lambda: nn.Sequential(Net(Plain), Net(Plain)), ["0", "1"]),  # the outermost
    (shared, ["0", "2"]),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), []),  # single layers keep only their input
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), []),
    (lambda: nn.Linear(4, 4), []),
]


@pytest.mark.parametrize(("model", "expected"), BLOCKS)
def test_the_repeated_blocks_are_found(model: Any, expected: list[str]) -> None:
    assert list(composite_blocks(model())) == expected


def test_what_was_found_is_said() -> None:
    (said,) = apply(Net(Plain), recompute=True)
    assert said == "recompute: 3 blocks (blocks.0 ... blocks.2)"
    model = nn.Linear(4, 4)
    (said,) = apply(model, recompute=True)
    assert said.endswith("so nothing is recomputed")
    assert "forward" not in model.__dict__
    assert apply(nn.Linear(4, 4)) == []


def test_a_block_of_two_models_is_wrapped_once() -> None:
    model = Net(Plain)
    apply(model, recompute=True)
    apply(nn.ModuleList(model.blocks), recompute=True)
    wrapped = model.blocks[0].__dict__["forward"]
    assert isinstance(wrapped, Recomputed)
    assert not isinstance(wrapped.__wrapped__, Wrapped)


def test_a_model_that_was_compiled_before_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    inplace = Plain()
    inplace.compile(backend="eager")
    for model in (torch.compile(Plain(), backend="eager"), inplace):
        (said,) = apply(model)
        assert said.startswith("this model was compiled before prepare, ")


def test_a_model_is_mixed_once() -> None:
    model = Net(Plain)
    for _ in range(2):
        apply(model, precision="bf16-mixed")
    assert not isinstance(model.__dict__["forward"].__wrapped__, Wrapped)


def test_a_scripted_model_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
    for options, what in (({"precision": "bf16-mixed"}, "precision bf16-mixed"), ({"compile": True}, "compile")):
        with pytest.raises(InputError, match=f"^{what} does not work on a scripted model: "):
            apply(model, **options)
    apply(model, recompute=True)
    assert model(batch()).shape == (6, 4)
