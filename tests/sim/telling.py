"""Runs single tests without pytest, whose start would take longer than most of them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
from _pytest.fixtures import FixtureFunctionDefinition
from _pytest.mark import ParameterSet


def module_of(story: str) -> str:
    """Returns the module named by a test's id."""
    return story.partition("::")[0].removesuffix(".py").replace("/", ".")


def tell(story: str) -> None:
    """Runs a test, a function of a module, with all its parameters. Raises what the test raises."""
    module = importlib.import_module(module_of(story))
    test: Callable[..., object] = getattr(module, story.partition("::")[2])
    for parameters in _parameters(test):
        with ExitStack() as stack:
            wanted = [name for name in inspect.signature(test).parameters if name not in parameters]
            made: dict[str, Any] = {}
            test(**parameters, **{name: _fixture(name, module, made, stack) for name in wanted})


def _parameters(test: Callable[..., object]) -> Iterator[dict[str, Any]]:
    """Yields the parameter sets of a test's marks, in all combinations."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    combinations: list[dict[str, Any]] = [{}]
    for mark in marks:
        names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
        rows = [ParameterSet.extract_from(row, force_tuple=len(names) == 1).values for row in mark.args[1]]
        combinations = [known | dict(zip(names, row, strict=True)) for known in combinations for row in rows]
    yield from combinations


def _fixture(name: str, module: ModuleType, made: dict[str, Any], stack: ExitStack) -> Any:
    """Returns a temporary directory, or the value of one of the module's fixtures."""
    if name == "tmp_path" and name not in made:
        made[name] = Path(stack.enter_context(TemporaryDirectory()))
    elif name == "monkeypatch" and name not in made:
        made[name] = stack.enter_context(pytest.MonkeyPatch.context())
    elif name not in made:
        make = _declared(name, module)._get_wrapped_function()
        given = {other: _fixture(other, module, made, stack) for other in inspect.signature(make).parameters}
        if inspect.isgeneratorfunction(make):
            made[name] = stack.enter_context(contextmanager(make)(**given))
        else:
            made[name] = make(**given)
    return made[name]


def _declared(name: str, module: ModuleType) -> FixtureFunctionDefinition:
    """Returns the fixture of a module, of the `conftest.py` beside it, or of those in the packages above. Raises
    `LookupError`."""
    package = module.__name__.rpartition(".")[0]
    places = [module.__name__, *(f"{'.'.join(parts)}.conftest" for parts in _upwards(package.split(".")))]
    for place in places:
        if importlib.util.find_spec(place) and (found := getattr(importlib.import_module(place), name, None)):
            assert isinstance(found, FixtureFunctionDefinition)
            return found
    raise LookupError(f"there is no fixture {name} for {module.__name__}")


def _upwards(parts: list[str]) -> Iterator[list[str]]:
    while parts:
        yield parts
        parts = parts[:-1]
