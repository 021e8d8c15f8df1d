"""Recipe: everything that defines a run, its digest, and how one is loaded from a file or a name."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from unisono.errors import InputError, nearest, require_positive_int

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

BUILT_IN = {
    "stdlib-gpt": "a byte-level GPT on the text of Python's own standard library",
    "digits": "a CNN with BatchNorm on scikit-learn's handwritten digits",
}
FLOAT32, BF16_MIXED, BF16, FP16_MIXED = "float32", "bf16-mixed", "bf16", "fp16-mixed"
PRECISIONS = (FLOAT32, BF16_MIXED, BF16, FP16_MIXED)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, on what, and how: the whole definition of a run.

    How a run is executed (processes, strategy, loader workers, folders) is no part of it.

    Attributes:
        model: Builds the model, under generators seeded from `seed`.
        loss: `loss(model, batch)` returns the micro-batch's mean loss, or (mean loss, weight) where the mean
            is not over samples; the weight is then, say, its number of tokens.
        optimizer: `optimizer(parameters)` builds any `torch.optim.Optimizer`.
        train: A map-style dataset, or a function without arguments that returns one (called on rank 0 first,
            so that only one process downloads).
        global_batch: Samples of one step, whatever the number of processes.
        micro_batch: Samples of one forward and backward. It bounds the processes that can share a step, and
            is part of the run's definition. Default: the global batch.
        epochs: Passes over `train`. Give this or `steps`; with neither, one epoch.
        steps: Optimizer updates.
        eval: Like `train`, for evaluation after each epoch and at the end.
        metrics: `metrics(model, batch)` returns {name: (sum, count)}; evaluation divides the totals once.
        schedule: `schedule(optimizer)` returns an LR scheduler; it is stepped once an optimizer step.
        collate: Makes a micro-batch of a list of samples. Default: torch's own.
        sample: `sample(model)` returns a text that shows what the trained model can do, printed at the end.
        seed: Of the weights, the order, dropout and augmentation.
        precision: "float32"; "bf16-mixed": forwards in bfloat16 where autocast finds that enough, and weights,
            gradients, their sums and updates in float32; "fp16-mixed": the same in float16, with a dynamic loss
            scale; "bf16": weights, gradients and their sums in bfloat16, updates in float32 on a second copy.
        compile: Whether forwards are compiled by `torch.compile`. Part of the definition, since compiled kernels
            round differently.
        threads: Intra-op threads a process; part of the definition, since CPU kernels add in an order that
            depends on it.
        clip_norm: Largest L2 norm of the whole gradient; None leaves it alone.
        drop_last: Leaves out the short last step of an epoch.
        init_from: A safetensors file (or a folder with model.safetensors) of weights to begin with, in place of the
            model's own.

    Raises:
        InputError: a field has a value that cannot work.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    optimizer: Callable[[Any], Optimizer]
    train: Any
    global_batch: int
    micro_batch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    eval: Any = None
    metrics: Callable[[nn.Module, Any], Mapping[str, tuple[Any, Any]]] | None = None
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    sample: Callable[[nn.Module], str] | None = None
    seed: int = 0
    precision: str = FLOAT32
    compile: bool = False
    threads: int = 1
    clip_norm: float | None = None
    drop_last: bool = False
    init_from: str | None = None

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer", "metrics", "schedule", "collate", "sample"):
            value = getattr(self, name)
            if not callable(value) and not (value is None and name not in ("model", "loss", "optimizer")):
                raise InputError(f"Recipe.{name} must be a function, got {value!r}")
        require_positive_int(self.global_batch, "Recipe.global_batch")
        require_positive_int(self.threads, "Recipe.threads")
        if self.micro_batch is None:
            object.__setattr__(self, "micro_batch", self.global_batch)
        check_micro_batch(self.global_batch, self.micro_batch, "Recipe")
        for name in ("epochs", "steps"):
            if getattr(self, name) is not None:
                require_positive_int(getattr(self, name), f"Recipe.{name}")
        if self.epochs is not None and self.steps is not None:
            raise InputError("Recipe has both epochs and steps: give the one that should end the run")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InputError(f"Recipe.seed must be an integer, got {self.seed!r}")
        check_precision(self.precision, "Recipe.precision")
        if not isinstance(self.compile, bool):
            raise InputError(f"Recipe.compile must be True or False, got {self.compile!r}")
        check_clip_norm(self.clip_norm, "Recipe.")
        if self.train is None:
            raise InputError("Recipe.train must be a dataset, or a function that returns one, got None")

    @property
    def full_num_micro(self) -> int:
        """Micro-batches of a full step: the most processes that can share one."""
        return -(-self.global_batch // (self.micro_batch or self.global_batch))

    def settings(self) -> dict[str, Any]:
        """Returns the plain values that define the run (not the functions)."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("compile", "init_from"):  # came later than the first digests: left out where they change nothing
            if not plain[name]:
                del plain[name]
        return {name: value for name, value in plain.items() if value is None or isinstance(value, int | float | str)}


def is_function(data: Any) -> bool:
    """Whether a recipe's data is a function that makes the dataset (a class counts as one), and no dataset."""
    is_dataset = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    return callable(data) and (isinstance(data, type) or not is_dataset)


def dataset_of(data: Any) -> Any:
    """Returns a recipe's dataset; makes it if need be.

    Raises:
        InputError: the function returned None.
    """
    if not is_function(data):
        return data
    found = data()
    if found is None:
        raise InputError(f"{getattr(data, '__name__', data)}() returned None: let it return the dataset")
    return found


def check_micro_batch(global_batch: int, micro_batch: object, where: str) -> int:
    """Returns `micro_batch` if it is a positive int no larger than `global_batch`.

    Raises:
        InputError: it is not.
    """
    micro = require_positive_int(micro_batch, f"{where}.micro_batch" if where else "micro_batch")
    if micro > global_batch:
        raise InputError(f"micro_batch {micro} is larger than global_batch {global_batch}: make it at most as large")
    return micro


def check_precision(precision: object, where: str = "precision") -> None:
    """Checks that there is such a precision.

    Raises:
        InputError: there is none.
    """
    if precision not in PRECISIONS:
        known = nearest(precision, PRECISIONS) if isinstance(precision, str) else ""
        raise InputError(f"{where} must be one of {', '.join(PRECISIONS)}, got {precision!r}{known}")


def check_clip_norm(clip_norm: object, where: str = "") -> None:
    """Checks that `clip_norm` is a positive number or None.

    Raises:
        InputError: it is not.
    """
    is_number = isinstance(clip_norm, int | float) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (is_number and clip_norm > 0):  # type: ignore[operator]
        raise InputError(f"{where}clip_norm must be a positive number or None, got {clip_norm!r}")


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with where it came from.

    Attributes:
        recipe: The recipe itself.
        name: A built-in's name, or the file's stem.
        source: A built-in's name, or the file's path.
        options: Every keyword of its function with the value used.
        origins: Where each value came from: "default", "--set", or the flag of a setting, such as "--steps".
        code_sha256: Of the file's text. Recorded, but no part of the digest: a comment may change.
    """

    recipe: Recipe
    name: str
    source: str
    options: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    code_sha256: str = ""

    @property
    def digest(self) -> str:
        """A SHA-256, as "sha256:" + hex, over the name, options and settings."""
        settings = self.recipe.settings()
        if self.recipe.init_from is not None:  # what it holds counts, and not where it lies
            settings["init_from"] = _hash_of_file(self.recipe.init_from)
        text = json.dumps([self.name, self.options, settings], sort_keys=True, default=_said)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    @property
    def definition(self) -> dict[str, Any]:
        """Its name, options and settings, by name."""
        settings = {f"Recipe.{name}": value for name, value in self.recipe.settings().items()}
        return {"recipe": self.name, **self.options, **settings}

    def with_steps(self, steps: int) -> LoadedRecipe:
        """Returns the same recipe ended after `steps` optimizer updates."""
        recipe = replace(self.recipe, steps=require_positive_int(steps, "--steps"), epochs=None)
        return replace(self, recipe=recipe, origins={**self.origins, "steps": "--steps"})

    def with_flags(
        self, *, precision: str | None = None, compile: bool | None = None, init_from: str | None = None
    ) -> LoadedRecipe:
        """Returns the same recipe with what flags say of it; None leaves a setting as the recipe has it."""
        if precision is not None:
            check_precision(precision, "--precision")
        flags = {"precision": precision, "compile": compile, "init_from": init_from}
        given = {name: value for name, value in flags.items() if value is not None}
        origins = {**self.origins, **{name: f"--{name.replace('_', '-')}" for name in given}}
        return replace(self, recipe=replace(self.recipe, **given), origins=origins)  # type: ignore[arg-type]


def _hash_of_file(name: str) -> str:
    path = Path(name) / "model.safetensors" if Path(name).is_dir() else Path(name)
    try:
        with path.open("rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def load_recipe(source: str, settings: Mapping[str, str] | None = None) -> LoadedRecipe:
    """Loads a built-in recipe by name, or a Python file with `recipe(**options) -> Recipe`.

    Args:
        source: A name of `BUILT_IN`, or a path.
        settings: Options as text (`--set key=value`), read by the type of the keyword's default.

    Raises:
        InputError: there is no such recipe or option, or the recipe's own code raised.
    """
    name, path, module = _import(source)
    function = getattr(module, "recipe", None)
    if not callable(function):
        raise _no_recipe(path)
    options, required = _options(function)
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    chosen = {}
    for key, text in (settings or {}).items():
        if key not in options and not accepts_any:
            known = f"; it has: {', '.join(options)}" if options else "; it has none"
            raise InputError(f"{name} has no option '{key}'{nearest(key, options) or known}")
        chosen[key] = _parse(text, options.get(key), key)
    if missing := [key for key in required if key not in chosen]:
        raise InputError(f"{name} needs a value for its option '{missing[0]}': give --set {missing[0]}=VALUE")
    origins = {key: "--set" if key in chosen else "default" for key in {**options, **chosen}}
    try:
        recipe = function(**chosen)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{path}: recipe() raised {_describe(error, path)}") from error
    if not isinstance(recipe, Recipe):
        raise InputError(f"{path}: recipe() returned {type(recipe).__name__}, not a unisono.Recipe")
    code = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return LoadedRecipe(recipe, name, source, {**options, **chosen}, origins, code)


def _import(source: str) -> tuple[str, str, ModuleType]:
    if source in BUILT_IN:
        module = importlib.import_module("unisono.recipes." + source.replace("-", "_"))
        return source, str(module.__file__), module
    path = Path(source)
    if not path.is_file():
        if path.suffix == ".py" or path.exists() or "/" in source:
            raise InputError(f"recipe file {source} does not exist" if not path.exists() else f"{source} is no file")
        raise InputError(
            f"there is no recipe '{source}'{nearest(source, BUILT_IN)}: give a Python file, or {' or '.join(BUILT_IN)}"
        )
    name = path.stem
    module_name = f"unisono_recipe_{name}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{source} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    text = path.read_text(errors="replace")
    if "unisono.init(" in text and not re.search(r"\brecipe\b|import \*", text):
        raise _no_recipe(source)  # before it runs: a loop of its own would train to its end, on one process
    # As `python file.py` would have it: the file's neighbours can be imported, its classes pickled.
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{source} cannot be loaded: {_describe(error, source)}") from error
    return name, str(path), module


def _no_recipe(path: str) -> InputError:
    own_loop = "unisono.init(" in Path(path).read_text(errors="replace")
    define = "define `def recipe(**options) -> unisono.Recipe`"
    return InputError(
        f"{path} has no function `recipe`: {f'start your own loop with `unisono run {path}`' if own_loop else define}"
    )


def _options(function: Callable[..., Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the keywords with their defaults, and the names of those that have none."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty]
    return {p.name: None if p.name in required else p.default for p in named}, required


def _parse(text: str, default: Any, key: str) -> Any:
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        value = text
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if default is not None and type(value) is not type(default):
        raise InputError(f"--set {key}={text}: {key} takes {_article(type(default).__name__)}, such as {default!r}")
    return value


def _said(value: Any) -> str:
    """Says what an option is; a function or a class by its name, since their `repr` holds an address."""
    return getattr(value, "__qualname__", None) or repr(value)


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _describe(error: BaseException, path: str) -> str:
    """Says what was raised, and at which line of the user's file."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == Path(path).resolve()]
    lines = lines or [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    at = f" (line {lines[-1]})" if lines and lines[-1] else ""
    return f"{type(error).__name__}: {error}{at}; --debug shows the traceback"
