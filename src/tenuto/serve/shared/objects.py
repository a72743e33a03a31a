"""The base of objects in requests of others' interfaces, which have fields that are known, but not supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from tenuto.base.checks import shown
from tenuto.serve.shared.schemas import Object, unsupported
from tenuto.serve.shared.undone import leave_undone

NOTHING: tuple[Any, ...] = (None, False, [], {})
"""Values that ask for nothing."""


class ForeignObject(Object):
    """An object in a request. Known fields that are not supported are refused unless they ask for nothing; a field that
    is not known at all may be `null`, which is as if it were not given. `ignored`: fields that never change an answer.
    `undone`: fields that ask for what is left undone, and said, with the values that ask for nothing."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    undone: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, harmless in cls.not_supported.items():
            if name in given and not any(given[name] == value for value in harmless):
                raise unsupported(name, f"is {shown(given[name])}; it is not supported, allowed: to leave it out")
        for name, harmless in cls.undone.items():
            if name in given and not any(given[name] == value for value in harmless):
                leave_undone(name)
        known = {field.alias or name for name, field in cls.model_fields.items()}
        left_out = cls.ignored.union(
            cls.not_supported, cls.undone, (name for name, value in given.items() if value is None)
        )
        return {name: value for name, value in given.items() if name in known or name not in left_out}
