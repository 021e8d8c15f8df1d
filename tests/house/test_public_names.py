"""What `import unisono` offers."""

from __future__ import annotations

import importlib.metadata
import inspect

import pytest

import unisono


def test_the_names_are_sorted_and_unique() -> None:
    assert list(unisono.__all__) == sorted(set(unisono.__all__))
    assert unisono.__all__


@pytest.mark.parametrize("name", getattr(unisono, "__all__", ()))
def test_each_name_exists_and_says_what_it_is(name: str) -> None:
    value = getattr(unisono, name)
    if not (inspect.isclass(value) or inspect.ismodule(value) or callable(value)):
        return  # a plain value, such as a version, has no docstring of its own
    text = value.__dict__.get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    assert text, f"unisono.{name} has no docstring"
    assert not text.startswith(f"{name}("), f"unisono.{name} has only the signature that dataclass made up"


def test_the_version_is_the_installed_one() -> None:
    version = getattr(unisono, "__version__", None)
    if version is None:
        pytest.skip("unisono.__version__ does not exist")
    assert version == importlib.metadata.version("unisono")
