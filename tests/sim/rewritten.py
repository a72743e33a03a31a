"""Changes functions of loaded modules by changing their source."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

Source = str | ast.Module


def rewrite(name: str, change: Callable[[str], Source]) -> None:
    """Gives the functions of module `name` the bodies in its changed source, until the process ends. Existing
    references to them are affected too. Only bodies of functions may change. Raises `ValueError`."""
    module = importlib.import_module(name)
    path = module.__file__ or ""
    source = Path(path).read_text()
    before, after = compile(source, path, "exec"), compile(change(source), path, "exec")
    changed = list(_changed(before, after))
    if not changed:
        raise ValueError(f"no function of {name} changes")
    for old, new in changed:
        _find(module, old).__code__ = new


def _changed(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yields the functions of a module or class that differ."""
    if not _alike(before, after):
        raise ValueError(f"{before.co_qualname} itself changes, not just its functions")
    for old, new in zip(_nested(before), _nested(after), strict=True):
        if not old.co_flags & inspect.CO_OPTIMIZED:  # a class
            yield from _changed(old, new)
        elif not _same(old, new):
            yield old, new


def _nested(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _alike(one: CodeType, other: CodeType) -> bool:
    """Returns whether both do the same, ignoring the functions inside them."""
    first, second = (
        (
            code.co_code,
            *(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
            [None if isinstance(c, CodeType) or c == code.co_firstlineno else (type(c), c) for c in code.co_consts],
        )
        for code in (one, other)
    )
    return first == second


def _same(one: CodeType, other: CodeType) -> bool:
    pairs = zip(_nested(one), _nested(other), strict=False)
    return _alike(one, other) and len(_nested(one)) == len(_nested(other)) and all(_same(a, b) for a, b in pairs)


def _find(module: ModuleType, code: CodeType) -> FunctionType:
    """Finds the function that was compiled to `code`."""
    found: Any = module
    for part in code.co_qualname.split("."):
        found = vars(found).get(part)
    for function in chain(_functions(found), gc.get_objects()):  # several may share a name
        if isinstance(function, FunctionType) and function.__code__ == code:
            return function
    raise ValueError(f"{module.__name__} has no function {code.co_qualname}")


def _functions(found: Any) -> Iterator[FunctionType]:
    """Yields a function, without its decorators."""
    if isinstance(found, property):
        found = [found.fget, found.fset, found.fdel]
    for each in found if isinstance(found, list) else [found]:
        inner = getattr(each, "__func__", each)
        inner = inspect.unwrap(inner) if callable(inner) else getattr(inner, "func", None)
        if isinstance(inner, FunctionType):
            yield inner
