"""The base of objects in requests of other APIs, some of whose fields are not supported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, ClassVar, get_args

from pydantic import model_validator

from tenuto.base.checks import shown
from tenuto.serve.shared.schemas import Object, unsupported
from tenuto.serve.shared.undone import leave_undone

NOTHING: tuple[Any, ...] = (None, False, [], {})
"""Values of a field that mean the same as its absence."""


class ForeignObject(Object):
    """An object in a request of another API. `ignored`: fields that never change an answer. `undone`: fields that are
    accepted but not carried out, which the answer reports. `not_supported`: fields that are refused. These two map each
    field to its values that mean the same as its absence. `unknown`: values with which an unknown field is ignored.
    With other values it is refused, as `unsupported` if the class's list of fields is not `complete`. `has_kinds`: the
    API has further values of the field `type`, which are not supported."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    undone: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    unknown: ClassVar[tuple[Any, ...]] = (None,)
    complete: ClassVar[bool] = True
    has_kinds: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind = given.get("type")
        if cls.has_kinds and isinstance(kind, str):
            kinds = get_args(cls.model_fields["type"].annotation)
            if kind not in kinds:
                allowed = ", ".join(kinds) if len(kinds) > 1 else shown(kinds[0])
                raise unsupported("type", f"is {shown(kind)}, which is not supported; allowed: {allowed}")
        for name, harmless in cls.not_supported.items():
            if name in given and given[name] not in harmless:
                raise unsupported(name, f"is {shown(given[name])}, which is not supported; leave it out")
        for name, harmless in cls.undone.items():
            if name in given and given[name] not in harmless:
                leave_undone(name)
        known = _known(cls)
        if given.keys() <= known:
            return given  # the usual case; there may be thousands of objects
        left_out = cls.ignored.union(cls.not_supported, cls.undone)
        return {
            name: value for name, value in given.items() if name in known or not cls._ignores(name, value, left_out)
        }

    @classmethod
    def _ignores(cls, name: str, value: Any, left_out: Collection[str]) -> bool:
        """Whether to ignore a field that the class does not have."""
        if name in left_out or value in cls.unknown:
            return True
        if not cls.complete and name.isprintable():  # lone surrogates could not be reported under that name
            raise unsupported(name, "is not supported; leave it out")
        return False


@cache
def _known(kind: type[ForeignObject]) -> frozenset[str]:
    """Returns the names of a class's fields."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())
