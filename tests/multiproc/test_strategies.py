"""Every strategy gives the bits of `ddp` on one process: for models and optimizers that hurt."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono
from tests.worlds import outcomes_of_world, run_world

F = nn.functional
SHARDED = ("zero1", "zero2", "zero3")


class Lamb(torch.optim.Optimizer):
    """Looks at whole parameters: You et al. 2020, algorithm 2, without its decay."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(param), torch.zeros_like(param)
                state["mean"].lerp_(param.grad, 0.1)
                state["square"].lerp_(param.grad.square(), 0.01)
                update = state["mean"] / (state["square"].sqrt() + 1e-6)
                ratio = float(param.norm() / (update.norm() + 1e-6))
                param.add_(update, alpha=-group["lr"] * min(max(ratio, 0.01), 10.0))


class Layer(nn.Module):
    """A transformer's, small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, 0.1, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(3 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.feed(x + self.attention(y, y, y, need_weights=False)[0])


class Tied(nn.Module):
    """Blocks, a head tied to the embedding, a parameter of no module, one that is never used, a scalar."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding, self.layers = nn.Embedding(11, 14), nn.ModuleList(Layer(14) for _ in range(3))
        self.place = nn.Parameter(torch.zeros(6, 14))
        self.head = nn.Linear(14, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding((x.abs() * 7).long().clamp(max=10)) + self.place
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return (self.head(x) * self.scale).mean(1)[:, :3]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 9, num_layers=2, batch_first=True), nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x[..., None])[0][:, -1])


class Routed(nn.Module):
    """Each micro-batch goes through one to six of the layers, by its data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.out = (
            nn.Linear(6, 8),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(6)),
            nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        for expert in self.experts[: 1 + int(x.detach().sum() * 16) % 6]:
            x = expert(x)
        return self.out(x)


def convolutional() -> nn.Module:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv1d(width, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU())

    model = nn.Sequential(nn.Unflatten(1, (1, 6)), block(1), block(8), block(8), nn.Flatten(), nn.Linear(48, 3))
    return model


def parametrized() -> nn.Module:
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)) for _ in range(2)]
    return nn.Sequential(*layers, nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))


class Mixed(nn.Module):
    """Parameters of three types, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 37), nn.Linear(37, 9).double(), nn.Linear(9, 3).bfloat16()
        self.across = nn.Parameter(torch.randn(9, 9).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(x).tanh().double()).float() @ self.across
        return self.three(x.bfloat16()).float()


MODELS: dict[str, Any] = {
    "tied": Tied,
    "recomputed": lambda: Tied(recompute=True),
    "recurrent": Recurrent,
    "routed": Routed,
    "convolutional": convolutional,
    "parametrized": parametrized,
    "mixed": Mixed,
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "fused-sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.001),
    "lamb": Lamb,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "muon": lambda p: torch.optim.Muon([param for param in p if param.dim() == 2], lr=0.01),
}


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(50, 6, generator=generator), torch.randint(0, 3, (50,), generator=generator)
    )


def train(strategy: str, model_name: str, optimizer_name: str, clip_norm: float | None = 0.5) -> dict[str, Any]:
    with unisono.init(seed=3, strategy=strategy) as run:
        model = MODELS[model_name]()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        # 16 = 5 + 5 + 5 + 1 samples; the last step has 2. Strided, 3 ranks attend two rounds, with shadows.
        model, optimizer, loader = run.prepare(
            model, optimizer, data(), global_batch=16, micro_batch=5, clip_norm=clip_norm
        )
        before, norms, losses = run.weights_digest(), [], []
        for _ in run.epochs(2):
            for x, y in loader:
                if len(x) == 1:
                    x, y = x.repeat(2, 1), y.repeat(2)  # BatchNorm needs two
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if run.step_done:
                    norms.append(float(run._stepper._exchange.norm).hex())
                    losses.append(run.values["loss"])
        accuracy = run.evaluate(model, data(), lambda m, b: (float((m(b[0]).argmax(1) == b[1]).sum()), len(b[1])))
        return {
            "before": before,
            "after": run.weights_digest(),
            "norms": norms,
            "accuracy": accuracy,
            "losses": losses,
            "state": digest_of(optimizer.state_dict()),
        }


def digest_of(value: Any) -> str:
    digest = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(repr(key).encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                feed(item)
        else:
            digest.update(repr(value).encode())

    feed(value)
    return digest.hexdigest()


@pytest.mark.parametrize("model", MODELS)
def test_every_strategy_gives_the_same_bits_for_every_model(model: str) -> None:
    """Cases 8 (losses and weights) and 9 (the norm of the whole gradient, which is clipped)."""
    alone = run_world(1, train, "ddp", model, "adamw")[0]
    assert alone["before"] != alone["after"]
    for strategy in SHARDED:
        for world_size in (2, 3):
            assert run_world(world_size, train, strategy, model, "adamw") == [alone] * world_size
    assert run_world(4, train, "hsdp", model, "adamw") == [alone] * 4


# The other optimizers go the same ways: elementwise, fused, or by whole parameters.
FEW = ("fused", "muon", "lamb")
OTHERS = [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in OPTIMIZERS if name != "adamw"]


@pytest.mark.parametrize("optimizer", OTHERS)
def test_every_strategy_gives_the_same_bits_for_every_optimizer(optimizer: str) -> None:
    """Case 23: Muon, Adafactor and LAMB among them."""
    alone = run_world(1, train, "ddp", "tied", optimizer)[0]
    assert alone["before"] != alone["after"]
    for strategy, world_size in (("ddp", 2), ("zero1", 2), ("zero2", 3), ("zero3", 1), ("zero3", 3), ("hsdp", 4)):
        assert run_world(world_size, train, strategy, "tied", optimizer) == [alone] * world_size


def one_large_step(strategy: str) -> list[torch.Tensor]:
    """SGD with a rate of 1 shows the gradient."""
    with unisono.init(seed=3, strategy=strategy) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = [param.detach().clone() for param in model.parameters()]
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=48, micro_batch=4, drop_last=True)
        seen = []
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            seen += run._session.comm.gather_objects((x, y))
        with run.whole():
            after = [param.detach().clone() for param in model.parameters()]
        return [
            *(one - two for one, two in zip(before, after, strict=True)),
            *before,
            *map(torch.cat, zip(*seen, strict=True)),
        ]


@pytest.mark.parametrize("strategy", ["ddp", *SHARDED, "hsdp"])
def test_the_gradient_is_the_average_of_plain_pytorch_and_not_the_sum(strategy: str) -> None:
    """Case 25."""
    for found in run_world(4, one_large_step, strategy):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))
        with torch.no_grad():
            for param, value in zip(model.parameters(), found[6:12], strict=True):
                param.copy_(value)
        x, y = found[12:]
        assert len(x) == 48
        F.cross_entropy(model(x), y).backward()
        for param, gradient in zip(model.parameters(), found[:6], strict=True):
            assert param.grad is not None
            torch.testing.assert_close(gradient, param.grad, rtol=1e-4, atol=1e-6)


def look_at_weights() -> dict[str, Any]:
    with unisono.init(seed=3, strategy="fsdp", timeout_s=30) as run:
        model = Tied()
        first = model.layers[0].feed[0].weight
        model, optimizer, loader = run.prepare(model, adamw(model), data(), global_batch=16, micro_batch=5)
        found: dict[str, Any] = {"strategy": run.strategy}
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            break
        found["between"] = bool(first.isnan().all()), first.shape
        try:
            model.state_dict()
        except unisono.InputError as error:
            found["refused"] = str(error)
        state = run.state()
        with run.whole():
            assert torch.equal(state["layers.0.feed.0.weight"], first)
            with torch.no_grad():
                first.fill_(0.5)
            found["forward"] = float(model(torch.ones(1, 6)).isnan().any())
        found["kept"] = bool((run.state()["layers.0.feed.0.weight"] == 0.5).all())
        found["predicted"] = run.predict(model, data(), lambda m, b: m(b[0]).argmax(1)).tolist()
        return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def test_weights_under_zero3_are_whole_where_they_are_asked_for() -> None:
    found = run_world(2, look_at_weights)
    assert found[0] == found[1]
    assert found[0]["strategy"] == "zero3"
    assert found[0]["between"] == (True, torch.Size([42, 14]))
    assert "call run.state() on every rank" in found[0]["refused"]
    assert found[0]["forward"] == 0.0
    assert found[0]["kept"] is True
    assert len(found[0]["predicted"]) == 50


def look_on_one_rank(strategy: str) -> str:
    """Forwards of one rank only, past one expert and then the other, between steps."""
    with unisono.init(seed=3, strategy=strategy) as run:
        model = Routed()
        model, optimizer, loader = run.prepare(model, adamw(model), data(), global_batch=16, micro_batch=5)
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if run.step_done:
                with run.whole():
                    if run.is_main:
                        found = [model(torch.full((1, 6), value)) for value in (9.0, -9.0, 9.0)]
                        assert not torch.cat(found).isnan().any()
                    assert not any(param.isnan().any() for param in model.parameters())
        return run.weights_digest()


def test_inside_of_whole_one_rank_may_go_another_way_through_the_model() -> None:
    alone = run_world(1, look_on_one_rank, "ddp")[0]
    for strategy in ("ddp", "zero3"):
        assert run_world(2, look_on_one_rank, strategy) == [alone] * 2


def loaded_state(strategy: str, after: bool) -> tuple[str, str]:
    """Trains, saves the optimizer's state, and goes on with another optimizer that loaded it."""
    with unisono.init(seed=3, strategy=strategy) as run:
        model = Recurrent()
        model, optimizer, loader = run.prepare(model, adamw(model), data(), global_batch=20, micro_batch=5)
        for _ in run.epochs(1):
            for x, y in loader:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
        saved = optimizer.state_dict()
        if after:  # into the prepared one: first spoiled, then loaded
            spoiled = {k: {n: v + 1 for n, v in s.items()} for k, s in saved["state"].items()}
            optimizer.load_state_dict({**saved, "state": spoiled})
            assert digest_of(optimizer.state_dict()) != digest_of(saved)
            optimizer.load_state_dict(saved)
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        return run.weights_digest(), digest_of(optimizer.state_dict())


def test_an_optimizers_state_can_be_saved_and_loaded_under_every_strategy() -> None:
    alone = run_world(1, loaded_state, "ddp", False)[0]
    for strategy in ("ddp", *SHARDED):
        assert run_world(2, loaded_state, strategy, True) == [alone] * 2


def user_clipping(strategy: str) -> None:
    with unisono.init(seed=3, strategy=strategy) as run:
        model = Recurrent()
        model, optimizer, loader = run.prepare(model, adamw(model), data(), global_batch=20, micro_batch=5)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_clipping_gradients_that_have_left_is_an_error(strategy: str) -> None:
    for outcome in outcomes_of_world(1, user_clipping, strategy):
        assert "single memory location" in str(outcome.error)


def adversarial(strategy: str) -> tuple[str, str]:
    """A GAN: two optimizers, two backward passes into one of them, and one through it into the other."""
    with unisono.init(seed=5, strategy=strategy) as run:
        maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        judge = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
        samples = torch.utils.data.TensorDataset(data().tensors[0])
        maker, first, loader = run.prepare(maker, adamw(maker), samples, global_batch=12, micro_batch=4)
        judge, second = run.prepare(judge, adamw(judge))
        before = run.weights_digest()
        for (x,) in loader:
            noise, yes, no = torch.randn(len(x), 4), torch.ones(len(x), 1), torch.zeros(len(x), 1)
            second.zero_grad()
            F.binary_cross_entropy_with_logits(judge(x), yes).backward()
            F.binary_cross_entropy_with_logits(judge(maker(noise).detach()), no).backward()
            second.step()
            first.zero_grad()
            F.binary_cross_entropy_with_logits(judge(maker(noise)), yes).backward()
            first.step()
        return before, run.weights_digest()


def test_a_gan_under_every_strategy() -> None:
    alone = run_world(1, adversarial, "ddp")[0]
    assert alone[0] != alone[1]
    for strategy in ("ddp", *SHARDED):
        assert run_world(3, adversarial, strategy) == [alone] * 3
