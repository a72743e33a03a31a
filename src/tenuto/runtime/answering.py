"""Answers to requests that other threads work on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def answered(work: Callable[[], T], answer: Callable[[T], None], refuse: Callable[[BaseException], None]) -> None:
    """Does `work`, and answers with what it returns, or refuses with what it raises."""
    try:
        value = work()
    except BaseException as error:  # noqa: BLE001 - every error is answered
        refuse(error)
    else:
        answer(value)
