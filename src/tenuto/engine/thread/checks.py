"""Checks of commands against the sessions that they concern; they change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tenuto.base.checks import items, shown, whole
from tenuto.base.errors import IllegalTransition, InvalidRequest, VersionMismatch
from tenuto.base.wire.document import Conversation
from tenuto.session.session import Session


def require_version(session: Session, version: int | None) -> None:
    """Raises `VersionMismatch` unless the session has this version, or it is `None`."""
    if version is not None and session.version != version:
        raise VersionMismatch(f"session {session.id} has version {session.version}, not {version}")


def ascending(turns: Sequence[int], most: int) -> list[int]:
    """Returns the numbers of turns, at most `most`. Raises `InvalidRequest` unless they ascend."""
    given = items("turns", turns, "a list of turn numbers")
    numbers = [whole("a turn number", number, 1, most, param="turns") for number in given]
    if any(later <= earlier for earlier, later in pairwise(numbers)):
        raise InvalidRequest(f"turns are {shown(numbers)}; allowed: ascending turn numbers", param="turns")
    return numbers


def check_pick(session: Session, numbers: Sequence[int]) -> None:
    """Raises `InvalidRequest` unless a conversation can consist of the turns of `session` with these numbers."""
    if numbers[:1] != [1] and numbers and session.records[0].conversation is not None:
        raise InvalidRequest(f"turn {numbers[0]} cannot open a conversation; allowed: turns that begin with turn 1")


def check_replacement(before: Conversation | None, after: Conversation | None) -> None:
    """Raises `IllegalTransition` if a conversation that replaces another lacks its system message or its tools."""
    if before is None or after is None:
        return
    if before.system and not after.system:
        raise IllegalTransition("the conversation begins with a system message; give it again, or keep the first turn")
    if before.tools != after.tools:
        had = "tools" if before.tools else "no tools"
        raise IllegalTransition(f"the conversation began with {had}; give the same tools, or keep the first turn")
