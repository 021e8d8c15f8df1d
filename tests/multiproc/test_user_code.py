"""Loops as people write them: the same bits on any number of processes, or one sentence that says why not."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.worlds import outcomes_of_world, run_world

F = nn.functional
# 3 micro-batches a step: 2 ranks share them unevenly. The last step is short: 3 ranks have one each, then one has none.
GENERATOR = torch.Generator().manual_seed(1)
DATA = torch.utils.data.TensorDataset(
    torch.randn(44, 6, generator=GENERATOR), torch.randint(0, 3, (44,), generator=GENERATOR)
)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def digest_of(body: Callable[..., None], strategy: str, *args: Any) -> tuple[str, str, str]:
    notes: list[str] = []
    unisono.Run.note = lambda self, sentence: notes.append(sentence)  # type: ignore[method-assign]
    with unisono.init(seed=5, strategy=strategy) as run:
        found = body(run, *args)
        return run.weights_digest(), repr(found), " ".join(notes)


def same_everywhere(body: Callable[..., None], *args: Any, strategies: tuple[str, ...] = ("ddp", "zero2")) -> Any:
    """Runs `body` on 1, 2 and 3 ranks and under several strategies; returns what it returned."""
    found = set()
    for strategy in strategies:
        for world_size in (1, 2, 3):
            results = run_world(world_size, digest_of, body, strategy, *args)
            found |= {(digest, value) for digest, value, _ in results}
    assert len(found) == 1
    return found.pop()[1]


def refused(body: Callable[..., None], words: str, world_size: int, *args: Any, strategy: str = "ddp") -> None:
    outcomes = outcomes_of_world(world_size, digest_of, body, strategy, *args)
    errors = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
    assert len(errors) == world_size
    assert any(words in error for error in errors), errors


def prepared(run: unisono.Run, model: nn.Module, optimizer: Any = None, micro_batch: int = 4, **options: Any) -> Any:
    return run.prepare(model, optimizer or adamw(model), DATA, global_batch=12, micro_batch=micro_batch, **options)


def train(run: unisono.Run, parts: Any, epochs: int = 2, turn: Callable[..., None] | None = None) -> None:
    model, optimizer, loader = parts
    for _ in run.epochs(epochs):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            if turn is not None:
                turn(run, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()


# Gradients


def leave_out(run: unisono.Run) -> None:
    """An update on even passes only; the pass is counted by the loader's epochs, alike on all ranks."""
    model, optimizer, loader = prepared(run, net())
    for epoch in run.epochs(4):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            if epoch % 2 == 0:
                optimizer.step()
            optimizer.zero_grad()


def test_steps_may_be_left_out() -> None:
    same_everywhere(leave_out)


def changed_unseen(run: unisono.Run, change: str) -> None:
    def turn(run: unisono.Run, model: nn.Module, optimizer: Any) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.data.clamp_(-1e-3, 1e-3) if change == "clamp" else param.grad.data.mul_(2)

    train(run, prepared(run, net()), turn=turn)


@pytest.mark.parametrize("change", ["clamp", "double"])
def test_gradients_may_be_changed_behind_torchs_back(change: str) -> None:
    same_everywhere(changed_unseen, change, strategies=("ddp", "zero1"))


def penalised(run: unisono.Run) -> None:
    model, optimizer, loader = prepared(run, nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)))
    for x, y in loader:
        x.requires_grad_(True)
        loss = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_penalty_with_a_graph_of_the_gradient() -> None:
    same_everywhere(penalised)


def accumulating(run: unisono.Run, every: int) -> None:
    model, optimizer, loader = prepared(run, net(), micro_batch=12 if run.world_size == 1 else 6)
    for number, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        if every and number % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("every", [0, 2])
def test_own_accumulation_and_a_forgotten_step_are_refused(every: int, world_size: int) -> None:
    refused(accumulating, "ended with gradients and without optimizer.step()", world_size, every)


# Random numbers


def noise_after(run: unisono.Run, where: str) -> None:
    model = net()
    parts = prepared(run, model)

    @torch.no_grad()
    def noise(*args: Any) -> None:
        for param in model.parameters():
            param.add_(torch.randn(param.shape), alpha=1e-3)

    if where == "hook":
        parts[1].register_step_post_hook(noise)
    for x, y in itertools.chain(parts[2], parts[2]):
        F.cross_entropy(model(x), y).backward()
        parts[1].step()
        if where == "loop" and run.step_done:
            noise()
        parts[1].zero_grad()


@pytest.mark.parametrize("where", ["hook", "loop"])
def test_noise_drawn_after_an_update_is_alike(where: str) -> None:
    same_everywhere(noise_after, where)


# Weights and buffers


class Capped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(7, 6, max_norm=0.5), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([x, self.table((x[:, 0] > 0).long())], dim=1))


def capped(run: unisono.Run, micro_batch: int) -> None:
    train(run, prepared(run, Capped(), micro_batch=micro_batch))


def test_weights_that_a_forward_changes() -> None:
    for world_size in (1, 2):
        refused(capped, "parameter table.weight was changed in step 0", world_size, 4)
    run_world(1, digest_of, capped, "ddp", 12)


class Momentum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) + self.key(x)


def momentum(run: unisono.Run, at: str) -> None:
    model = Momentum()
    _, optimizer, loader = prepared(run, model, torch.optim.SGD(model.query.parameters(), lr=0.1))
    for x, y in loader:
        if at == "before":
            model.follow()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if at == "step_done" and run.step_done:
            model.follow()
        optimizer.zero_grad()


def test_a_momentum_encoder_belongs_behind_the_update() -> None:
    same_everywhere(momentum, "step_done")
    refused(momentum, "parameter key.weight was changed", 2, "before")


def transposed(run: unisono.Run) -> list[float]:
    weight = nn.Parameter(torch.arange(15.0).view(5, 3).t() / 15)
    model = nn.Module()
    model.weight = weight
    optimizer = torch.optim.AdamW([weight], lr=0.01, fused=True)
    _, optimizer, loader = prepared(run, model, optimizer)
    for x, _ in loader:
        (x[:, :3] @ weight).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach().flatten().tolist()


def test_a_fused_update_of_a_transposed_parameter_is_right() -> None:
    found = torch.tensor(eval(same_everywhere(transposed))).view(3, 5)
    start = torch.arange(15.0).view(5, 3).t() / 15
    # Each update of Adam moves a weight by about its rate: 4 steps towards zero, but for what is zero already.
    assert (start - found)[start > 0.1].mean() == pytest.approx(0.04, rel=0.2)


def thawing(run: unisono.Run) -> bool:
    model = net()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    _, optimizer, loader = prepared(run, model)
    for x, y in loader:
        model[0].requires_grad_(True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_(False)
    return not torch.equal(before, model[0].weight)


def test_a_layer_thawed_for_each_turn_is_trained() -> None:
    assert same_everywhere(thawing) == "True"


def own_buffers(run: unisono.Run, when: str) -> float:
    model = net()
    norm: Any = model[1]
    _, optimizer, loader = prepared(run, model)
    if when == "hook":
        optimizer.register_step_post_hook(lambda *args: norm.running_mean.fill_(0.25))
    saved = copy.deepcopy(model.state_dict())
    for epoch in run.epochs(2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if when == "loop" and run.step_done:
                norm.running_mean.fill_(0.25)
        if when == "load" and epoch == 0:
            model.load_state_dict(saved)
            assert torch.equal(norm.running_mean, saved["1.running_mean"])
    return float(norm.running_mean[0])


@pytest.mark.parametrize("when", ["hook", "loop", "load"])
def test_buffers_that_the_user_changes_stay_changed(when: str) -> None:
    found = float(same_everywhere(own_buffers, when))
    assert (found == 0.25) == (when != "load")


def buffers_unlike(run: unisono.Run) -> None:
    parts = prepared(run, net())
    if run.is_main:
        parts[0](DATA.tensors[0])
    train(run, parts)


def test_buffers_changed_on_one_rank_are_an_error() -> None:
    refused(buffers_unlike, "buffers were changed between step", 2)


class Cache(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 3), kind
        self.register_buffer("cache", None if "none" in kind else torch.zeros(1), persistent="kept" in kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.ones(2)
        elif "grows" in self.kind:
            self.cache = torch.zeros(len(self.cache) + 1)
        elif "type" in self.kind:
            self.cache = self.cache.double()
        return self.linear(x)


def caching(run: unisono.Run, kind: str) -> None:
    train(run, prepared(run, Cache(kind)))


def test_caches_are_left_alone_and_state_keeps_its_shape() -> None:
    for kind in ("none", "grows", "type"):
        same_everywhere(caching, kind, strategies=("ddp",))
        for world_size in (1, 2):
            refused(caching, "buffer cache", world_size, f"{kind} kept")


def frozen_statistics(run: unisono.Run) -> bool:
    model = net().double()
    model[1].running_mean.fill_(1 / 3)
    before = model[1].running_mean.clone()
    model, optimizer, loader = prepared(run, model)
    model[1].eval()
    for x, y in loader:
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.equal(before, model[1].running_mean)


def test_frozen_statistics_in_float64_stay_to_the_bit() -> None:
    assert same_everywhere(frozen_statistics) == "True"


# Several optimizers and loaders


def half_prepared(run: unisono.Run, step_it: bool) -> None:
    model = net()
    rest = torch.optim.SGD(model[3].parameters(), lr=0.1)
    parts = prepared(run, model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    for x, y in parts[2]:
        F.cross_entropy(model(x), y).backward()
        parts[1].step()
        if step_it:
            rest.step()
        model.zero_grad()


def test_an_optimizer_that_was_not_prepared() -> None:
    for _, _, notes in run_world(2, digest_of, half_prepared, "ddp", False):
        assert "are in no prepared optimizer: 1.bias, 1.weight" in notes or "1.weight, 1.bias" in notes
    refused(half_prepared, "the ranks' weights have parted", 3, True)


def two_optimizers(run: unisono.Run) -> list[int]:
    model, other = net(), net()
    average, done = copy.deepcopy(model), []
    _, first, loader = prepared(run, model)
    _, second = run.prepare(other, adamw(other))
    for x, y in itertools.chain(loader, loader):
        F.cross_entropy(model(x), y).backward()
        first.step()
        F.cross_entropy(other(x) + model(x).detach(), y).backward()
        second.step()
        if run.step_done:
            done.append(run.step)
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
    assert len(done) == 8
    return [*done, *(float(p.detach().double().sum()) for p in average.parameters())]


def test_a_step_of_two_optimizers_is_done_once_both_are_stepped() -> None:
    same_everywhere(two_optimizers)


def logs_late(run: unisono.Run) -> None:
    model, optimizer, loader = prepared(run, net())
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        run.log(late=1.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_log_after_the_update_is_refused(world_size: int) -> None:
    refused(logs_late, "after optimizer.step(): call it before", world_size)


def shared_parameter(run: unisono.Run) -> None:
    model = net()
    prepared(run, model)
    run.prepare(model, adamw(model))


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    refused(shared_parameter, "0.weight is in two prepared optimizers", 1)


def cycling(run: unisono.Run) -> None:
    model, extra = net(), nn.Linear(1, 1)
    many, few = (torch.utils.data.TensorDataset(*(t[:n] for t in DATA.tensors)) for n in (36, 12))
    model, optimizer, loader = run.prepare(model, adamw(model), many, global_batch=12, micro_batch=4)
    _, _, other = run.prepare(extra, adamw(extra), few, global_batch=12, micro_batch=4)
    for (x, y), (x2, y2) in zip(loader, itertools.chain(other, other, other), strict=True):
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(x2), y2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.flush()
    assert run.step == 3


def test_a_short_loader_may_go_round_beside_a_long_one() -> None:
    same_everywhere(cycling, strategies=("ddp",))
