"""Stand-ins for packages that a suite imports and that its tests of HTTP do not need."""

import importlib.abc
import importlib.machinery
import sys
import types
import unittest
from collections.abc import Sequence
from unittest.mock import MagicMock


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of packages before any others; their attributes are mocks."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self,
        fullname: str,
        path: object = None,
        target: object = None,  # noqa: ARG002 - the interface's
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns a spec for modules of the packages, except those in a directory (`path`)."""
        known = not path and fullname.partition(".")[0] in self._packages
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Returns a module of mocks."""
        return standing_in(spec.name, [])

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: the module is complete."""


def standing_in(name: str, path: list[str]) -> types.ModuleType:
    """Returns a module whose attributes are mocks, with submodules in the directories of `path`."""

    def attribute(wanted: str) -> object:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return unittest.TestCase if wanted == "CustomTestCase" else MagicMock(name=f"{name}.{wanted}")

    module = types.ModuleType(name)
    module.__path__ = path
    module.__getattr__ = attribute  # type: ignore[method-assign]
    return module


def stand_in(*packages: str) -> None:
    """Lets the packages be imported."""
    sys.meta_path.insert(0, StandIns(packages))
