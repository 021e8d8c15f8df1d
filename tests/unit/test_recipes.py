"""The built-in recipes: what their models, datasets, metrics and samples promise. No process group."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unisono.errors import InputError
from unisono.recipe import BUILT_IN, LoadedRecipe, load_recipe
from unisono.recipes import digits, stdlib_gpt

TINY = {"width": "16", "depth": "2", "heads": "2", "context": "8", "steps": "4"}


class Constant(nn.Module):
    """Answers every batch with the same rows of logits."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.logits


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a run has it; two threads on models this small wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_gpt() -> stdlib_gpt.GPT:
    torch.manual_seed(1)
    return stdlib_gpt.GPT(width=16, depth=2, heads=2, context=8, dropout=0.1).eval()


def generator_states() -> tuple[Any, Any, bytes]:
    return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().numpy().tobytes()


def built_in(name: str, settings: dict[str, str] | None = None) -> LoadedRecipe:
    if name == "digits":
        pytest.importorskip("sklearn")
    return load_recipe(name, settings)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_step_of_eight_micro_batches_can_be_shared_by_eight_processes(name: str) -> None:
    assert load_recipe(name).recipe.full_num_micro >= 8


@pytest.mark.parametrize("name", BUILT_IN)
def test_its_functions_can_be_pickled_for_spawned_processes(name: str) -> None:
    recipe = load_recipe(name).recipe
    again = pickle.loads(pickle.dumps(recipe))
    torch.manual_seed(0)
    first = recipe.model().state_dict()
    torch.manual_seed(0)
    second = again.model().state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("module", ["stdlib_gpt", "digits"])
def test_importing_and_defining_it_reads_no_data(module: str) -> None:
    code = (
        "import builtins, importlib, os, sys\n"
        f"module = importlib.import_module('unisono.recipes.{module}')\n"
        "def refuse(*_, **__): raise SystemExit('data was read')\n"
        "os.walk = builtins.open = refuse\n"
        "module.recipe()\n"
        "assert 'sklearn' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "key", "text"), [("stdlib-gpt", "width", "64"), ("stdlib-gpt", "depth", "1"), ("digits", "width", "8")]
)
def test_a_model_option_changes_the_model_and_the_digest(name: str, key: str, text: str) -> None:
    plain, changed = load_recipe(name), load_recipe(name, {key: text})
    sizes = [sum(p.numel() for p in loaded.recipe.model().parameters()) for loaded in (plain, changed)]
    assert sizes[1] < sizes[0]
    assert changed.digest != plain.digest


def test_run_options_reach_the_recipe_and_the_optimizer() -> None:
    loaded = load_recipe("stdlib-gpt", {**TINY, "lr": "0.5", "weight_decay": "0.25", "micro_batch": "1", "seed": "7"})
    optimizer = loaded.recipe.optimizer(loaded.recipe.model().parameters())
    assert (loaded.recipe.steps, loaded.recipe.micro_batch, loaded.recipe.seed) == (4, 1, 7)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    assert {p.dim(): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]} == {
        1: 0.0,
        2: 0.25,
    }


def test_every_parameter_of_the_gpt_is_optimized_once() -> None:
    model = tiny_gpt()
    optimizer = stdlib_gpt.adamw(model.parameters(), lr=1.0, weight_decay=0.0)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_schedule_falls_and_stays_low_past_its_end(name: str) -> None:
    settings = TINY | {"warmup": "2", "steps": "40"} if name == "stdlib-gpt" else {"epochs": "4"}
    recipe = load_recipe(name, settings).recipe
    optimizer = recipe.optimizer(recipe.model().parameters())
    peak = optimizer.param_groups[0]["lr"]
    assert recipe.schedule is not None
    schedule = recipe.schedule(optimizer)
    rates = []
    for _ in range(60):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert max(rates) <= max(peak, rates[2]) and 0 <= rates[-1] < max(rates) / 10
    assert rates[55:] == [rates[55]] * 5


def test_gpt_gives_logits_of_every_byte_at_every_place() -> None:
    model = tiny_gpt()
    assert model(torch.zeros(3, 8, dtype=torch.int64)).shape == (3, 8, 256)
    assert model(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 256)


def test_gpt_is_causal() -> None:
    model = tiny_gpt()
    before = torch.arange(8)[None]
    after = before.clone()
    after[0, 5] = 200
    first, second = model(before), model(after)
    assert torch.equal(first[:, :5], second[:, :5])
    assert all(not torch.equal(first[:, place], second[:, place]) for place in range(5, 8))


def test_gpt_ties_its_embedding_to_its_head() -> None:
    model = tiny_gpt()
    assert model.head.weight.untyped_storage().data_ptr() == model.bytes.weight.untyped_storage().data_ptr()
    assert sum(p.shape == (256, 16) for p in model.parameters()) == 1
    assert {"bytes.weight", "head.weight"} <= set(model.state_dict())


def test_gpt_refuses_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(InputError, match=r"width 10 .* heads 4"):
        load_recipe("stdlib-gpt", {"width": "10", "heads": "4"})


def test_untrained_gpt_is_nearly_as_good_as_a_guess() -> None:
    batch = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(0))
    assert stdlib_gpt.loss(tiny_gpt(), batch).item() == pytest.approx(5.545, abs=0.1)  # ln 256


def test_gpt_learns_a_text_that_repeats() -> None:
    recipe = load_recipe("stdlib-gpt", TINY | {"lr": "0.02", "warmup": "1", "dropout": "0.0"}).recipe
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    batch = torch.arange(9).repeat(4, 1)
    losses = []
    for _ in range(30):
        value = recipe.loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert losses[-1] < losses[0] / 4


def test_windows_lie_side_by_side_and_share_one_byte() -> None:
    windows = stdlib_gpt.Windows(np.arange(12, dtype=np.uint8), 4)
    assert [windows[i].tolist() for i in range(len(windows))] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert windows[0].dtype == torch.int64


@pytest.mark.parametrize(("num_bytes", "count"), [(5, 1), (8, 1), (9, 2), (13, 3)])
def test_only_whole_windows_count(num_bytes: int, count: int) -> None:
    assert len(stdlib_gpt.Windows(np.zeros(num_bytes, np.uint8), 4)) == count


def test_windows_can_be_limited() -> None:
    assert len(stdlib_gpt.Windows(np.zeros(100, np.uint8), 4, limit=7)) == 7
    assert len(stdlib_gpt.Windows(np.zeros(9, np.uint8), 4, limit=7)) == 2
    spread = stdlib_gpt.Windows(np.arange(200, dtype=np.uint8), 4, limit=5)
    assert [int(spread[i][0]) for i in range(len(spread))] == [0, 36, 72, 108, 144]


def test_a_window_past_the_end_is_an_index_error() -> None:
    windows = stdlib_gpt.Windows(np.zeros(9, np.uint8), 4)
    with pytest.raises(IndexError):
        windows[2]


def test_the_text_is_the_library_in_order_without_tests_and_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.py", "a.py", "a/z.py", "a/test/t.py", "test/t.py", "site-packages/p.py", "c.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{name}>")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert stdlib_gpt.standard_library().tobytes() == b"<a.py><a/z.py><b.py>"


def test_a_python_without_its_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InputError, match=str(tmp_path)):
        stdlib_gpt.standard_library()


def test_train_and_eval_are_real_text_and_do_not_overlap() -> None:
    text = stdlib_gpt.standard_library()
    train, held_out = stdlib_gpt.train_windows(64), stdlib_gpt.eval_windows(64)
    assert b"class OrderedDict(dict):" in text.tobytes()
    assert len(train) * 64 > 0.9 * len(text) > 3_000_000
    assert 100 <= len(held_out) <= 1000
    last, first = train[len(train) - 1].numpy().astype(np.uint8), held_out[0].numpy().astype(np.uint8)
    ends, starts = text.tobytes().rfind(last.tobytes()) + 65, text.tobytes().rfind(first.tobytes())
    assert 0 <= starts - ends < 64


def test_gpt_metrics_are_sums_over_tokens() -> None:
    logits = torch.full((2, 3, 256), 0.0)
    logits[..., 7] = 50.0  # sure of byte 7
    batch = torch.tensor([[1, 7, 7, 7], [1, 7, 7, 9]])
    found = stdlib_gpt.metrics(Constant(logits), batch)
    assert (float(found["accuracy"][0]), found["accuracy"][1]) == (5.0, 6)
    assert float(found["loss"][0]) == pytest.approx(50.0) and found["loss"][1] == 6
    assert float(stdlib_gpt.loss(Constant(logits), batch)) == pytest.approx(50.0 / 6)


def test_sample_is_the_same_each_time_and_touches_no_global_generator() -> None:
    model = tiny_gpt().train()  # with dropout in training mode a sample would draw from torch's generator
    before = generator_states()
    first = stdlib_gpt.sample(model, context=8)
    torch.manual_seed(123)
    middle = generator_states()
    second = stdlib_gpt.sample(model, context=8)
    assert first == second
    assert middle == generator_states()
    torch.set_rng_state(torch.frombuffer(bytearray(before[2]), dtype=torch.uint8))
    stdlib_gpt.sample(model, context=8)
    assert before == generator_states()
    assert first.startswith("def ")
    assert 100 < len(first) <= 304
    assert all(p.grad is None for p in model.parameters())


def test_cnn_gives_ten_logits_an_image_and_has_batch_norm() -> None:
    model = digits.CNN(width=4, dropout=0.1)
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 3


def test_digits_metrics_are_sums_over_images() -> None:
    logits = torch.full((3, 10), 0.0)
    logits[:, 2] = 30.0
    found = digits.metrics(Constant(logits), (torch.zeros(3, 1, 8, 8), torch.tensor([2, 2, 5])))
    assert (float(found["accuracy"][0]), found["accuracy"][1]) == (2.0, 3)
    assert float(found["loss"][0]) == pytest.approx(30.0) and found["loss"][1] == 3


def test_digits_split_is_every_fifth_image() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    data = sklearn.load_digits()
    train, held_out = digits.train_digits(), digits.eval_digits()
    assert (len(train), len(held_out)) == (digits.NUM_TRAIN, digits.NUM_IMAGES - digits.NUM_TRAIN) == (1437, 360)
    image, label = held_out[3]
    assert image.shape == (1, 8, 8) and image.dtype == torch.float32
    assert label == data.target[15]
    assert (image[0] * 16).tolist() == data.images[15].tolist()
    assert [train[i][1] for i in range(5)] == [int(data.target[i]) for i in (1, 2, 3, 4, 6)]


def test_digits_are_moved_by_both_global_generators() -> None:
    pytest.importorskip("sklearn")
    train = digits.train_digits()

    def draw(seed: int, numpy_seed: int) -> list[float]:
        random.seed(seed)
        np.random.seed(numpy_seed)
        return [value for i in range(8) for value in train[i][0].flatten().tolist()]

    assert draw(0, 0) == draw(0, 0)
    assert draw(0, 0) != draw(1, 0)
    assert draw(0, 0) != draw(0, 1)


def test_a_moved_digit_keeps_its_strokes() -> None:
    image = np.zeros((1, 8, 8), np.float32)
    image[0, 3, 4] = 1.0
    moved = digits.Digits(image, np.array([1]), augment=True)
    places = {tuple(torch.nonzero(moved[0][0][0])[0].tolist()) for _ in range(300)}
    assert places == {(y, x) for y in (2, 3, 4) for x in (3, 4, 5)}


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    recipe = load_recipe("digits").recipe
    with pytest.raises(InputError, match=r"needs scikit-learn: pip install 'unisono\[digits\]'"):
        recipe.train()


def test_cnn_learns_in_two_epochs() -> None:
    recipe = built_in("digits", {"width": "8"}).recipe
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, data = recipe.model(), recipe.train()
    optimizer = recipe.optimizer(model.parameters())
    for _ in range(2):
        for batch in torch.utils.data.DataLoader(data, 32):
            recipe.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recipe.metrics is not None
    with torch.no_grad():
        (held_out,) = torch.utils.data.DataLoader(recipe.eval(), 360)
        correct, count = recipe.metrics(model.eval(), held_out)["accuracy"]
    assert count == 360
    assert float(correct) / count > 0.8
