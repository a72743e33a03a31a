"""The processes of the ranks after the first one, which call the same methods as that one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from subprocess import TimeoutExpired
from typing import Any

from tenuto.base.child import ENDED_SECONDS, Child
from tenuto.exec.forward import Forward
from tenuto.exec.parallel.ranks import GroupRanks

Build = Callable[[GroupRanks], Forward]
"""Builds a rank's forward pass, which calls the methods of its `GroupRanks` only once these are connected. Raises
`ModelError` or `ConfigError`."""


@dataclass(frozen=True, slots=True)
class Start:
    """A follower's first message: how it builds its forward pass, and the arguments of its `GroupRanks`."""

    build: Build
    rank: int
    size: int
    meeting: str
    device: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A follower's answer instead of a result."""

    reason: str


class Followers:
    """The processes. Methods raise `OSError` or `EOFError` if a process has ended."""

    def __init__(self, starts: Sequence[Start]) -> None:
        self._children = [Child("tenuto.exec.parallel.follower") for _ in starts]
        for child, start in zip(self._children, starts, strict=True):
            child.send(start)

    def tell(self, name: str, *args: Any) -> None:
        """Tells all to call a method of their forward passes."""
        self.tell_each(name, [args] * len(self._children))

    def tell_each(self, name: str, args: Sequence[tuple[Any, ...] | None]) -> None:
        """Has each call a method with its own arguments; one with `None` calls nothing."""
        for child, given in zip(self._children, args, strict=True):
            if given is not None:
                child.send((name, given))

    def answers(self) -> list[Any]:
        """Returns the next answer of each."""
        return [child.answer() for child in self._children]

    def ended(self) -> str:
        """Describes the processes that have ended, or end soon; "" if all go on."""
        found = []
        for rank, child in enumerate(self._children, start=1):
            with suppress(TimeoutExpired):
                found.append(f"rank {rank} has ended with status {child.status(ENDED_SECONDS)}")
        return ", ".join(found)

    def close(self) -> None:
        """Ends all processes."""
        for child in self._children:
            child.end_input()
        for child in self._children:
            child.close()
