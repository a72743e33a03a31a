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
    """An object in a request of another API. Known fields that are not supported are refused unless they ask for
    nothing. `ignored`: fields that never change an answer. `undone`: fields that ask for what is left undone, and said,
    with the values that ask for nothing. `unknown`: values with which a field that is not known at all is as if it were
    not given; with others it is refused, as `unsupported` where the API's list of fields is not complete.
    `has_kinds`: clients may know other values of its field `type`, which are not supported."""

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
                raise unsupported("type", f"is {shown(kind)}; that is not supported, allowed: {allowed}")
        for name, harmless in cls.not_supported.items():
            if name in given and given[name] not in harmless:
                raise unsupported(name, f"is {shown(given[name])}; it is not supported, allowed: to leave it out")
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
