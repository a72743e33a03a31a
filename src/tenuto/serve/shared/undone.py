"""Request fields that this server accepts but does not carry out, since the answer is as good without them. A header of
the answer and the log name these fields."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WrapValidator

from tenuto.base.tools.definitions import MAX_TOOLS
from tenuto.serve.shared.answer_headers import LEFT_UNDONE, answer_headers

T = TypeVar("T")

MAX_NOTES = 32
"""Maximum number of fields named in one answer."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:-]")


def leave_undone(name: str) -> None:
    """Records that the field `name` of the request being read is not carried out."""
    headers = answer_headers()
    names = dict.fromkeys(filter(None, headers.get(LEFT_UNDONE, "").split(", ")))
    if len(names) < MAX_NOTES:
        names[_UNSAFE.sub("_", name[:64])] = None
        headers[LEFT_UNDONE] = ", ".join(names)


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
