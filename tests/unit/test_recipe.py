"""Recipes: what defines a run, and how one is loaded."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import InputError
from unisono.recipe import BUILT_IN, LoadedRecipe, Recipe, dataset_of, load_recipe


def nothing(*args: Any) -> Any:
    return None


def recipe(**changes: Any) -> Recipe:
    fields = {"model": nothing, "loss": nothing, "optimizer": nothing, "train": [1], "global_batch": 32}
    return Recipe(**{**fields, **changes})


@pytest.fixture(autouse=True)
def _imports_are_forgotten() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("unisono_recipe_") or name == "helper_of_recipe":
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a recipe file; returns its path."""

    def write(body: str, name: str = "mine.py") -> str:
        head = "import unisono\n\ndef nothing(*args):\n    return None\n\n"
        path = tmp_path / name
        path.write_text(head + textwrap.dedent(body))
        return str(path)

    return write


MAKE = "return unisono.Recipe(model=nothing, loss=nothing, optimizer=nothing, train=[1], "
PLAIN = f"""
def recipe(width=64, lr=1e-3, name="adam", deep=False, cap=None, betas=(0.9, 0.99)):
    {MAKE} global_batch=width, clip_norm=cap)
"""


# The dataclass


def test_what_is_left_out_has_a_value() -> None:
    found = recipe()
    assert found.micro_batch == 32
    assert (found.seed, found.threads, found.precision, found.drop_last) == (0, 1, "float32", False)
    assert found.epochs is found.steps is found.clip_norm is found.eval is None


def test_it_is_frozen_and_takes_keywords_only() -> None:
    with pytest.raises(FrozenInstanceError):
        recipe().seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Recipe(nothing, nothing, nothing, [1], 32)  # type: ignore[misc]


@pytest.mark.parametrize(("batch", "micro", "processes"), [(32, None, 1), (32, 8, 4), (33, 8, 5), (8, 8, 1), (7, 1, 7)])
def test_the_most_processes_that_can_share_a_step(batch: int, micro: int | None, processes: int) -> None:
    assert recipe(global_batch=batch, micro_batch=micro).full_num_micro == processes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "Recipe.model must be a function, got None"),
        ({"loss": "mse"}, "Recipe.loss must be a function, got 'mse'"),
        ({"optimizer": 3}, "Recipe.optimizer must be a function"),
        ({"metrics": {}}, "Recipe.metrics must be a function"),
        ({"schedule": 1}, "Recipe.schedule must be a function"),
        ({"collate": "x"}, "Recipe.collate must be a function"),
        ({"sample": "x"}, "Recipe.sample must be a function"),
        ({"train": None}, "Recipe.train must be a dataset"),
        ({"global_batch": 0}, "Recipe.global_batch must be a positive integer, got 0"),
        ({"global_batch": 32.0}, "Recipe.global_batch must be a positive integer, got 32.0"),
        ({"global_batch": True}, "Recipe.global_batch must be a positive integer, got True"),
        ({"micro_batch": -1}, "Recipe.micro_batch must be a positive integer, got -1"),
        ({"micro_batch": 33}, "micro_batch 33 is larger than global_batch 32"),
        ({"threads": 0}, "Recipe.threads must be a positive integer"),
        ({"epochs": 0}, "Recipe.epochs must be a positive integer"),
        ({"steps": "10"}, "Recipe.steps must be a positive integer, got '10'"),
        ({"epochs": 1, "steps": 1}, "Recipe has both epochs and steps"),
        ({"seed": 1.5}, "Recipe.seed must be an integer, got 1.5"),
        ({"seed": False}, "Recipe.seed must be an integer, got False"),
        (
            {"precision": "float8"},
            "precision must be one of float32, bf16-mixed, bf16, fp16-mixed, got 'float8'",
        ),
        (
            {"precision": ["bf16-mixed"]},
            "precision must be one of float32, bf16-mixed, bf16, fp16-mixed, got ['bf16-mixed']",
        ),
        ({"precision": "fp16"}, "got 'fp16' (did you mean 'bf16'?)"),
        ({"compile": 1}, "Recipe.compile must be True or False, got 1"),
        ({"clip_norm": 0}, "Recipe.clip_norm must be a positive number or None, got 0"),
        ({"clip_norm": float("nan")}, "Recipe.clip_norm must be a positive number or None, got nan"),
        ({"clip_norm": "1"}, "Recipe.clip_norm must be a positive number or None, got '1'"),
    ],
)
def test_a_value_that_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        recipe(**changes)


# Loading


def test_the_built_in_recipes() -> None:
    for name in BUILT_IN:
        found = load_recipe(name)
        assert (found.name, found.source) == (name, name)
        assert isinstance(found.recipe, Recipe)
        assert set(found.origins.values()) == {"default"}


def test_options_have_the_type_of_their_default(write: Callable[..., str]) -> None:
    given = {"width": "128", "lr": "1", "name": "3", "deep": "true", "cap": "0.5", "betas": "(0.5, 0.6)"}
    found = load_recipe(write(PLAIN), given)
    wanted = {"width": 128, "lr": 1.0, "name": "3", "deep": True, "cap": 0.5, "betas": (0.5, 0.6)}
    assert found.options == wanted
    assert {name: type(value) for name, value in found.options.items()} == {n: type(v) for n, v in wanted.items()}
    assert found.recipe.global_batch == 128
    assert found.recipe.clip_norm == 0.5
    assert set(found.origins.values()) == {"--set"}


def test_origins_say_who_chose(write: Callable[..., str]) -> None:
    path = write(PLAIN)
    found = load_recipe(path, {"lr": "3e-4", "deep": "False", "cap": "none"})
    assert found.options == {"width": 64, "lr": 3e-4, "name": "adam", "deep": False, "cap": None, "betas": (0.9, 0.99)}
    chosen = {name for name, origin in found.origins.items() if origin == "--set"}
    assert chosen == {"lr", "deep", "cap"}
    assert {origin for name, origin in found.origins.items() if name not in chosen} == {"default"}
    assert (found.name, found.source) == ("mine", path)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("width", "wide", "--set width=wide: width takes an int, such as 64"),
        ("width", "1.5", "--set width=1.5: width takes an int, such as 64"),
        ("width", "True", "width takes an int"),
        ("lr", "fast", "lr takes a float, such as 0.001"),
        ("lr", "True", "lr takes a float"),
        ("deep", "1", "deep takes a bool, such as False"),
        ("betas", "0.5", "betas takes a tuple"),
        ("betas", "(0.5,", "betas takes a tuple"),
        ("widht", "3", "mine has no option 'widht' (did you mean 'width'?)"),
        ("zzzzz", "3", "mine has no option 'zzzzz'; it has: width, lr, name, deep, cap, betas"),
    ],
)
def test_an_option_that_cannot_work_is_refused(write: Callable[..., str], key: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load_recipe(write(PLAIN), {key: text})


def test_a_recipe_without_options_says_so(write: Callable[..., str]) -> None:
    path = write(f"def recipe():\n    {MAKE} global_batch=2)\n")
    assert load_recipe(path).options == {}
    with pytest.raises(InputError, match="mine has no option 'x'; it has none"):
        load_recipe(path, {"x": "1"})


def test_an_option_without_a_default_must_be_given(write: Callable[..., str]) -> None:
    path = write(f"def recipe(*, batch, lr=0.1):\n    {MAKE} global_batch=batch)\n")
    assert load_recipe(path, {"batch": "4"}).recipe.global_batch == 4
    with pytest.raises(InputError, match="mine needs a value for its option 'batch': give --set batch=VALUE"):
        load_recipe(path, {"lr": "1"})


def test_a_recipe_may_take_any_option(write: Callable[..., str]) -> None:
    path = write(f"def recipe(batch=2, **more):\n    {MAKE} global_batch=batch + more['extra'])\n")
    found = load_recipe(path, {"extra": "3"})
    assert found.recipe.global_batch == 5
    assert found.options == {"batch": 2, "extra": 3}
    assert found.origins == {"batch": "default", "extra": "--set"}


def test_a_file_sees_its_neighbours_and_its_classes_can_be_pickled(write: Callable[..., str], tmp_path: Path) -> None:
    import pickle

    (tmp_path / "helper_of_recipe.py").write_text("BATCH = 6\n")
    found = load_recipe(
        write("""
        import helper_of_recipe
        class Data:
            def __len__(self): return 9
            def __getitem__(self, index): return index
        def recipe():
            return unisono.Recipe(
                model=nothing, loss=nothing, optimizer=nothing, train=Data(), global_batch=helper_of_recipe.BATCH)
        """)
    )
    assert found.recipe.global_batch == 6
    assert len(pickle.loads(pickle.dumps(found.recipe.train))) == 9


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = 1", "has no function `recipe`"),
        ("recipe = 3", "has no function `recipe`"),
        ("def recipe():\n    return 3", "recipe() returned int, not a unisono.Recipe"),
        ("def recipe():\n    return None", "recipe() returned NoneType"),
        ("def recipe():\n\n    return 1 / 0", "recipe() raised ZeroDivisionError: division by zero (line 8)"),
        ("\n\n1 / 0", "cannot be loaded: ZeroDivisionError: division by zero (line 8)"),
        ("import no_such_module_here", "cannot be loaded: ModuleNotFoundError: No module named"),
        ("def recipe(:", "cannot be loaded: SyntaxError"),
        ("import sys\nsys.exit(3)", "cannot be loaded: SystemExit"),
        ("def recipe():\n    raise SystemExit", "recipe() raised SystemExit"),
        (f"def recipe():\n    {MAKE} global_batch=0)", "Recipe.global_batch must be a positive integer, got 0"),
        (f"def recipe():\n    {MAKE} global_batch=1, lr=3)", "unexpected keyword argument 'lr'"),
    ],
)
def test_a_file_that_cannot_work_is_refused(write: Callable[..., str], body: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load_recipe(write(body))


@pytest.mark.parametrize("word", ["", "# no recipe here\n"])
def test_a_loop_of_its_own_is_sent_to_the_other_command(tmp_path: Path, word: str) -> None:
    path = tmp_path / "loop.py"
    path.write_text(f"{word}import sys, unisono\nsys.ran = True\nif __name__ == '__main__':\n    unisono.init()\n")
    with pytest.raises(
        InputError, match=re.escape(f"no function `recipe`: start your own loop with `unisono run {path}`")
    ):
        load_recipe(str(path))
    # Where nothing can be a recipe it is not even run: its whole training would come before the sentence.
    assert sys.__dict__.pop("ran", False) == bool(word)


def test_a_recipe_may_come_from_elsewhere_in_a_file_with_a_loop(write: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "helper_of_recipe.py").write_text(Path(write(PLAIN)).read_text())
    for line in ("from helper_of_recipe import recipe", "from helper_of_recipe import *"):
        assert load_recipe(write(f"{line}\nif __name__ == '__main__':\n    unisono.init()\n")).options["width"] == 64


def test_a_file_that_is_not_there(tmp_path: Path, write: Callable[..., str]) -> None:
    for source, message in {
        str(tmp_path / "none.py"): "does not exist",
        "none.py": "recipe file none.py does not exist",
        str(tmp_path): "is no file",
        "digit": "there is no recipe 'digit' (did you mean 'digits'?)",
        "qqq": "give a Python file, or stdlib-gpt or digits",
        write(PLAIN, "mine.txt"): "is not a Python file: its name must end in .py",
    }.items():
        with pytest.raises(InputError, match=re.escape(message)):
            load_recipe(source)


# The digest


def test_the_digest_of_a_recipe_never_changes() -> None:
    # Written down once: another value would make every saved run look like another recipe's.
    loaded = LoadedRecipe(recipe(steps=10, clip_norm=1.0), "mine", "mine.py", {"lr": 0.1, "width": 64})
    assert loaded.digest == "sha256:86ae532641c264ce07c9027e5c015b39b7e605089ceb3f81d127d7c3767ddd78"


def test_the_digest_depends_on_what_defines_the_run_and_nothing_else(write: Callable[..., str], tmp_path: Path) -> None:
    path = write(PLAIN)
    first = load_recipe(path)
    assert re.fullmatch("sha256:[0-9a-f]{64}", first.digest)
    assert load_recipe(path).digest == first.digest
    # Chosen by hand or by default, in this folder or another, with a comment or without: the same run.
    assert load_recipe(path, {"lr": "0.001"}).digest == first.digest
    (tmp_path / "elsewhere").mkdir()
    moved = load_recipe(write(PLAIN + "# a comment\n", "elsewhere/mine.py"))
    assert moved.digest == first.digest
    assert moved.code_sha256 != first.code_sha256
    changed = [
        first,
        load_recipe(path, {"lr": "0.002"}),
        load_recipe(path, {"width": "65"}),
        load_recipe(path, {"name": "sgd"}),
        load_recipe(write(PLAIN, "other.py")),
        first.with_steps(3),
        first.with_steps(4),
        *(replace(first, recipe=replace(first.recipe, **{field: value})) for field, value in CHANGES.items()),
    ]
    assert len({each.digest for each in changed}) == len(changed)


CHANGES = {"seed": 1, "micro_batch": 7, "threads": 2, "clip_norm": 2.0, "drop_last": True, "epochs": 2}
CHANGES |= {"precision": "bf16-mixed", "compile": True}


def test_with_steps_wins_over_epochs(write: Callable[..., str]) -> None:
    found = load_recipe(write(f"def recipe():\n    {MAKE} global_batch=2, epochs=3)\n"))
    limited = found.with_steps(7)
    assert (limited.recipe.steps, limited.recipe.epochs) == (7, None)
    assert limited.origins == {"steps": "--steps"}
    assert (found.recipe.steps, found.recipe.epochs) == (None, 3)
    with pytest.raises(InputError, match="--steps must be a positive integer, got 0"):
        found.with_steps(0)


def test_flags_change_the_recipe_and_say_so(write: Callable[..., str]) -> None:
    found = load_recipe(write(f"def recipe():\n    {MAKE} global_batch=2, compile=True)\n"))
    assert found.with_flags().digest == found.digest
    changed = found.with_flags(precision="bf16-mixed", compile=False)
    assert (changed.recipe.precision, changed.recipe.compile) == ("bf16-mixed", False)
    assert changed.origins == {"precision": "--precision", "compile": "--compile"}
    assert changed.digest not in (found.digest, found.with_flags(compile=False).digest)
    with pytest.raises(InputError, match=r"^--precision must be one of float32, .*, fp16-mixed, got 'fp16'"):
        found.with_flags(precision="fp16")


def test_functions_as_options_do_not_make_the_digest_unstable(write: Callable[..., str]) -> None:
    path = write(f"def recipe(act=nothing, cls=dict):\n    {MAKE} global_batch=2)\n")
    assert load_recipe(path).digest == load_recipe(path).digest


def test_data_is_a_dataset_or_what_makes_one() -> None:
    class Data(list[int]):
        pass

    made = Data([1, 2])
    assert dataset_of(made) is made
    assert dataset_of(lambda: made) is made
    assert dataset_of(Data) == []

    def nothing() -> None:
        return None

    with pytest.raises(InputError, match=r"nothing\(\) returned None"):
        dataset_of(nothing)
