from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """The value, where a story needs one."""
    assert value is not None
    return value
