"""Request fields that this server accepts but does not carry out, since the answer is as good without them. A header of
the answer and the log name these fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WrapValidator

from tenuto.base.tools.definitions import MAX_TOOLS

T = TypeVar("T")

HEADER = "x-tenuto-left-undone"
MAX_NOTES = 32
"""Maximum number of fields named in one answer."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:-]")
_notes: ContextVar[dict[str, None] | None] = ContextVar("left_undone", default=None)


@contextmanager
def noting() -> Iterator[dict[str, None]]:
    """Collects the names that `leave_undone` gets inside the block, in order and each once."""
    notes: dict[str, None] = {}
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def leave_undone(name: str) -> None:
    """Records that the field `name` of the request being read is not carried out."""
    notes = _notes.get()
    if notes is not None and len(notes) < MAX_NOTES:
        notes[_UNSAFE.sub("_", name[:64])] = None


def _kept(tools: list[Any]) -> list[Any]:
    return [tool for tool in tools if tool is not None]


ToolList = Annotated[list[T], Field(fail_fast=True, max_length=MAX_TOOLS), AfterValidator(_kept)]
"""A list of tools annotated with `of_type`."""


def of_type(*kinds: str) -> WrapValidator:
    """Returns a validator for tools. Tools of other types than `kinds` are left out, as the server cannot run them."""

    def known(given: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        other = given.get("type") if isinstance(given, dict) else None
        if isinstance(other, str) and other not in kinds:
            leave_undone(f"tools.{other}")
            return None
        return validate(given)

    return WrapValidator(known)
