"""Faults that users have met elsewhere, each with the right value, on one rank and on several."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unisono
from tests.worlds import outcomes_of_world, run_world
from unisono.errors import InputError

WORLDS = (1, 2, 3, 4)


def same_on_all(function: Any, *args: Any, worlds: tuple[int, ...] = WORLDS) -> Any:
    """Returns the one result that every rank of every world gives."""
    expected = run_world(worlds[0], function, *args)[0]
    for world_size in worlds[1:]:
        for rank, found in enumerate(run_world(world_size, function, *args)):
            assert found == expected, f"rank {rank} of {world_size}"
    return expected


class Ragged(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Token sequences of which very different numbers are valid; some none at all."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = (torch.arange(12) * (index + 3)) % 17
        valid = torch.arange(12) < (0 if 8 <= index < 12 else (index * 7) % 13)  # micro-batch 2 is all padding
        return tokens, torch.where(valid, (tokens * 5 + 1) % 17, torch.tensor(-100))


def token_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 17))


def token_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def train_tokens() -> list[list[float]]:
    with unisono.init() as run:
        model = token_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        _, _, loader = run.prepare(model, optimizer, Ragged(), global_batch=22, micro_batch=4, shuffle=False)
        for batch in loader:
            run.backward(token_loss(model, batch), weight=(batch[1] != -100).sum())
            optimizer.step()
            optimizer.zero_grad()
        return [p.flatten().tolist() for p in model.parameters()]


def test_case_1_uneven_tokens_give_the_gradient_of_the_global_token_mean() -> None:
    found = same_on_all(train_tokens)
    from unisono.numerics.seeds import derive_seed, seed_cpu

    seed_cpu(derive_seed(0, "init"))
    model = token_model()
    before = [p.clone() for p in model.parameters()]
    tokens, labels = (torch.stack(part) for part in zip(*(Ragged()[i] for i in range(22)), strict=True))
    token_loss(model, (tokens, labels)).backward()
    for parameter, start, values in zip(model.parameters(), before, found, strict=True):
        expected = (start - 0.5 * parameter.grad).flatten()
        torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-6, atol=1e-7)
        assert not torch.equal(torch.tensor(values), start.flatten())


class Ten(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), index


def evaluate_ten() -> Any:
    with unisono.init() as run:
        seen: list[int] = []

        def metric(model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
            seen.extend(batch[1].tolist())
            thirds = batch[1].double() / 3
            return {"third": (thirds.sum(), len(thirds)), "even": ((batch[1] % 2 == 0).sum(), len(thirds))}

        found = run.evaluate(nn.Identity(), Ten(), metric, micro_batch=3)
        counts = run._session.comm.gather_objects(seen)
        return found, sorted(index for part in counts for index in part)


def test_case_2_evaluation_counts_each_sample_once() -> None:
    found, seen = same_on_all(evaluate_ten)
    assert seen == list(range(10))
    assert found == {"third": 1.5, "even": 0.5}


def predict_ten() -> Any:
    with unisono.init() as run:
        tensor = run.predict(nn.Identity(), Ten(), lambda model, batch: batch[0][:, 0] * 2, micro_batch=3)
        words = run.predict(nn.Identity(), Ten(), lambda model, batch: [f"<{i}>" for i in batch[1]], micro_batch=4)
        return tensor.tolist(), words


def test_case_3_predictions_come_in_dataset_order_without_padding() -> None:
    tensor, words = same_on_all(predict_ten)
    assert tensor == [2.0 * i for i in range(10)]
    assert words == [f"<{i}>" for i in range(10)]


class Forked(nn.Module):
    """A branch for odd labels only, a frozen weight, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.odd, self.frozen = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.never = nn.Parameter(torch.ones(5))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, use_odd: bool) -> torch.Tensor:
        hidden = self.frozen(self.trunk(x))
        return self.odd(hidden) if use_odd else hidden


def train_forked() -> Any:
    with unisono.init() as run:
        model = Forked()
        frozen = model.frozen.weight.clone()
        # Weight decay would move a parameter whose gradient is zero, but not one whose gradient is None.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        notes: list[str] = []
        run._stepper._exchange._on_note = notes.append
        _, _, loader = run.prepare(model, optimizer, Ten(), global_batch=5, micro_batch=1, shuffle=False)
        odd = model.odd.weight.clone()
        for x, label in loader:  # micro-batch 1 of step 0 alone uses the branch, on one rank only
            model(x, run.step == 0 and label.item() == 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with run.whole():
            assert torch.equal(model.frozen.weight, frozen)
            assert not torch.equal(model.odd.weight, odd)
            never = model.never.tolist()
        return run.weights_digest(), never, notes


def test_case_10_unused_frozen_and_never_used_parameters() -> None:
    digest, never, notes = same_on_all(train_forked)
    assert never == [1.0] * 5, "torch skips a parameter whose gradient is None, and so must we"
    assert notes == ["no gradient in the first step for: never"]
    assert digest.startswith("sha256:")


def train_uneven() -> Any:
    with unisono.init() as run:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        _, _, loader = run.prepare(model, optimizer, Ten(), global_batch=4, micro_batch=1)
        shapes = set()
        for _ in run.epochs(3):
            for x, _label in loader:
                shapes.add(tuple(x.shape))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return run.weights_digest(), run.step, sorted(shapes)


def test_case_11_ranks_with_unequal_numbers_of_micro_batches() -> None:
    _, steps, shapes = same_on_all(train_uneven)  # 10 = 4 + 4 + 2: in the last step two of four ranks are idle
    assert steps == 9
    assert shapes == [(1, 3)], "user code must never meet an empty batch"


def epochs_without_set_epoch() -> Any:
    with unisono.init() as run:
        _, _, loader = run.prepare(
            model := nn.Linear(3, 2), torch.optim.SGD(model.parameters(), 0.1), Ten(), global_batch=5, micro_batch=1
        )
        orders = [[label.item() for _, label in loader] for _ in range(3)]
        return run._session.comm.gather_objects(orders), run.step


def test_case_12_each_epoch_has_its_own_order_and_all_samples() -> None:
    orders = run_world(1, epochs_without_set_epoch)[0][0][0]
    assert len({tuple(order) for order in orders}) == 3
    for world_size in (2, 4):
        parts, steps = run_world(world_size, epochs_without_set_epoch)[0]
        assert steps == 0, "batches that were only looked at are no steps"
        for epoch in range(3):
            assert sorted(label for rank in parts for label in rank[epoch]) == list(range(10))


class Drawing(Dataset[tuple[int, list[float]]]):
    """Draws from all three global generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def draw(num_workers: int) -> Any:
    with unisono.init() as run:
        _, _, loader = run.prepare(
            model := nn.Linear(3, 2),
            torch.optim.SGD(model.parameters(), 0.1),
            Drawing(),
            global_batch=12,
            micro_batch=3,
            num_workers=num_workers,
        )
        rows = [
            (epoch, index, tuple(draws))
            for epoch in range(2)
            for indices, values in loader
            for index, draws in zip(indices.tolist(), values.tolist(), strict=True)
        ]
        return sorted(row for part in run._session.comm.gather_objects(rows) for row in part)


def test_case_13_augmentation_is_independent_of_workers_and_ranks() -> None:
    expected = run_world(1, draw, 0)[0]
    assert len({row[2] for row in expected}) == 24, "each sample and epoch draws something else"
    for column in range(3):
        assert len({row[2][column] for row in expected}) == 24
    for world_size, num_workers in ((1, 3), (2, 0), (2, 2), (4, 1)):
        assert run_world(world_size, draw, num_workers)[0] == expected


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def train_tied() -> Any:
    with unisono.init() as run:
        model = Tied()
        start = model.embed.weight.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        _, _, loader = run.prepare(model, optimizer, Ragged(), global_batch=11, micro_batch=3)
        for batch in loader:
            run.backward(token_loss(model, batch), weight=(batch[1] != -100).sum())
            optimizer.step()
            optimizer.zero_grad()
        assert model.head.weight is model.embed.weight
        assert not torch.equal(start, model.embed.weight)
        return run.weights_digest(), sorted(run.state())


def test_case_21_tied_embeddings_stay_one_parameter() -> None:
    _, names = same_on_all(train_tied)
    assert names == ["embed.weight"]


def train_gan(style: str) -> Any:
    with unisono.init() as run:
        generator = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        critic = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
        opt_g = torch.optim.Adam(generator.parameters(), lr=1e-2)
        opt_d = torch.optim.Adam(critic.parameters(), lr=1e-2)
        data = TensorDataset(torch.linspace(0, 1, 48).view(16, 3))
        _, _, loader = run.prepare(critic, opt_d, data, global_batch=8, micro_batch=2, name="critic")
        run.prepare(generator, opt_g, name="generator")
        bce = nn.functional.binary_cross_entropy_with_logits
        for _ in range(3):
            for (real,) in loader:
                fake = generator(torch.randn(len(real), 2))
                opt_d.zero_grad()
                # Two backward passes before one step, as people write it.
                bce(critic(real), torch.ones(len(real), 1)).backward()
                bce(critic(fake.detach()), torch.zeros(len(real), 1)).backward()
                opt_d.step()
                if run.step % 2 == 0:  # the generator is updated every other step
                    opt_g.zero_grad()
                    bce(critic(fake), torch.ones(len(real), 1)).backward()
                    opt_g.step()
                if style == "log":
                    run.log(fake=fake.mean())
        return run.weights_digest(), len(opt_g.state_dict()["state"]), run.step


def test_case_22_gan_with_different_numbers_of_updates() -> None:
    digest, states, steps = same_on_all(train_gan, "")
    assert (states, steps) == (6, 6)
    assert same_on_all(train_gan, "log", worlds=(1, 3))[0] == digest, "logging cannot show in the weights"


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_cases_10_21_and_22_under_every_strategy(strategy: str) -> None:
    for function, args in ((train_forked, ()), (train_tied, ()), (train_gan, ("",))):
        expected = run_world(1, function, *args)[0]
        for world_size in (2, 3):
            assert run_world(world_size, function, *args, strategy=strategy) == [expected] * world_size


def count_by_local_index() -> Any:
    with unisono.init(timeout_s=20) as run:
        first, second = nn.Linear(3, 2), nn.Linear(3, 2)
        one, two = (torch.optim.SGD(model.parameters(), 0.1) for model in (first, second))
        _, _, loader = run.prepare(first, one, Ten(), global_batch=10, micro_batch=1)
        run.prepare(second, two)
        for index, (x, _label) in enumerate(loader):
            first(x).mean().backward()
            one.step()
            if index % 2 == 0:
                second(x).mean().backward()
                two.step()


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_decided_by_a_local_index_is_refused(world_size: int) -> None:
    """It would mean something else on every number of ranks."""
    outcomes = outcomes_of_world(world_size, count_by_local_index)
    assert all(isinstance(outcome.error, InputError) for outcome in outcomes)
    assert "run.step" in str(outcomes[0].error)


def train_with_two_backwards(late_weight: bool) -> Any:
    with unisono.init() as run:
        model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 70), nn.ReLU(), nn.Linear(70, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        _, _, loader = run.prepare(model, optimizer, Ten(), global_batch=4, micro_batch=1)
        strategy = run._stepper.units[0].strategy
        strategy._bucket_bytes, strategy._one_shot_bytes = 1, 0  # many buckets, so that some are sent early
        resends = []
        resend = strategy.resend
        strategy.resend = lambda plan: (resends.append(run.step), resend(plan))
        for x, label in loader:
            model(x).square().mean().backward()
            if label.item() == 3:  # on one rank, in one step
                model(-x).abs().mean().backward()
            if late_weight and label.item() == 5:
                run._stepper.set_weight(2.5)
            optimizer.step()
            optimizer.zero_grad()
        return run.weights_digest(), len(resends)


@pytest.mark.parametrize("late_weight", [False, True])
def test_a_gradient_that_changes_after_it_was_sent_is_sent_again(late_weight: bool) -> None:
    digest, resends = run_world(1, train_with_two_backwards, late_weight)[0]
    assert resends == 0
    for world_size in (2, 4):
        for found in run_world(world_size, train_with_two_backwards, late_weight, transport="gloo"):
            assert found[0] == digest
    assert found[1] >= 1, "at W = 4 a micro-batch was sent early, and had to be sent again"


def mistakes(kind: str) -> None:
    with unisono.init(timeout_s=20) as run:
        if kind == "split":
            torch.manual_seed(run.rank)
        model, other = nn.Linear(3, 2), nn.Linear(3, 2)
        optimizer = torch.optim.SGD((other if kind == "other model" else model).parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        data: Any = torch.utils.data.random_split(Ten(), [8, 2])[0]
        _, _, loader = run.prepare(model, optimizer, data, global_batch=8, micro_batch=1)
        for index, (x, _label) in enumerate(loader):
            model(x).square().mean().backward()
            if kind != "accumulation" or (index + 1) % 4 == 0:
                optimizer.step()
            if kind == "schedule":
                schedule.step()


@pytest.mark.parametrize(
    ("kind", "worlds", "part"),
    [
        ("schedule", (1, 2, 4), "learning rate changed inside"),
        ("accumulation", (1, 2), "for every batch of the loader"),
        ("other model", (1, 2), "no parameter of the optimizer got a gradient"),
        ("split", (2,), "another dataset"),
    ],
)
def test_what_would_depend_on_the_number_of_ranks_is_refused(kind: str, worlds: tuple[int, ...], part: str) -> None:
    for world_size in worlds:
        outcomes = outcomes_of_world(world_size, mistakes, kind)
        assert all(isinstance(outcome.error, InputError) for outcome in outcomes), outcomes
        assert part in str(outcomes[0].error)


def train_with_buffers_that_matter() -> Any:
    """Two models of one optimizer; spectral norm's buffers decide what the next forward computes."""
    with unisono.init() as run:
        encoder = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 8))
        decoder = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.05)
        _, _, loader = run.prepare((encoder, decoder), optimizer, Ten(), global_batch=8, micro_batch=2)
        before = run.weights_digest()
        for _ in run.epochs(3):
            for x, _label in loader:
                decoder(encoder(x / 5)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert run.weights_digest() != before
        return run.weights_digest(), sorted(run.state())[:2], decoder[0].num_batches_tracked.item()


def test_several_models_of_one_optimizer_and_buffers_that_a_forward_reads() -> None:
    _, names, batches = same_on_all(train_with_buffers_that_matter)
    assert names[0].startswith("model.")
    assert batches == 6


def loader_forms(form: str) -> Any:
    with unisono.init() as run:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        data: Any = Ten()
        options: dict[str, Any] = {"global_batch": 8}
        if form == "dataset":
            options["micro_batch"] = 2
        elif form == "dataloader":
            data = DataLoader(data, batch_size=2, shuffle=True)
        elif form == "workers":
            data = DataLoader(data, batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
        elif form == "list":
            data, options["micro_batch"] = [Ten()[i] for i in range(10)], 2
        elif form == "huggingface":
            import datasets

            table = datasets.Dataset.from_dict({"x": [[float(i)] * 3 for i in range(10)], "y": list(range(10))})
            data, options["micro_batch"] = table.with_format("torch"), 2
        elif form == "tensors":
            data, options["micro_batch"] = TensorDataset(torch.stack([Ten()[i][0] for i in range(10)])), 2
        _, _, loader = run.prepare(model, optimizer, data, **options)
        for _ in run.epochs(2):
            for batch in loader:
                x = batch["x"] if isinstance(batch, dict) else batch[0]
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return run.weights_digest()


def test_every_form_of_the_same_data_gives_the_same_weights() -> None:
    digests = {form: same_on_all(loader_forms, form, worlds=(1, 3)) for form in FORMS}
    assert len(set(digests.values())) == 1, digests


FORMS = ("dataset", "dataloader", "workers", "list", "huggingface", "tensors")


def average_of_weights() -> Any:
    with unisono.init() as run:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, loader = run.prepare(model, optimizer, Ten(), global_batch=8, micro_batch=2)
        ema = copy.deepcopy(model)
        for _ in run.epochs(2):
            for x, _label in loader:
                run.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if run.step_done:
                    with torch.no_grad():
                        for average, now in zip(ema.parameters(), model.parameters(), strict=True):
                            average.lerp_(now, 0.1)
                    run.evaluate(ema, Ten(), lambda m, b: m(b[0]).sum(1).mean())
        return unisono.weights_digest(dict(ema.state_dict())), run.values["loss"], run.ledger.metrics["value"]


def test_an_average_of_weights_kept_by_the_user_and_evaluation_in_mid_epoch() -> None:
    _, loss, value = same_on_all(average_of_weights)
    assert loss > 0
    assert value == value


def rank0_prepares(path: str) -> Any:
    from pathlib import Path

    with unisono.init() as run:
        with run.rank0_first():
            there = Path(path).exists()
            if not there:
                Path(path).write_text("prepared")
        mean = run.mean(float(run.rank + 1), weight=run.rank + 1)
        return there, mean


def test_rank0_first_and_mean(tmp_path: Any) -> None:
    found = run_world(3, rank0_prepares, str(tmp_path / "data"))
    assert [there for there, _ in found] == [False, True, True]
    assert {mean for _, mean in found} == {(1 + 4 + 9) / 6}
