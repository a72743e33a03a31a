"""What turns are made of: their transitions, and their input as tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

import numpy as np

from tenuto.base.checks import shown
from tenuto.base.errors import ContextExceeded, InvalidRequest
from tenuto.base.turns import TurnState

Rank = tuple[bool, float, int]
"""What `Turn.rank` sorts by."""

TRANSITIONS: dict[str, tuple[frozenset[TurnState], TurnState]] = {
    "submit": (frozenset({TurnState.DRAFTING}), TurnState.QUEUED),
    "start": (frozenset({TurnState.QUEUED, TurnState.PREEMPTED}), TurnState.RUNNING),
    "preempt": (frozenset({TurnState.RUNNING}), TurnState.PREEMPTED),
    "commit": (frozenset({TurnState.RUNNING, TurnState.PREEMPTED}), TurnState.COMMITTED),
    "abort": (
        frozenset({TurnState.DRAFTING, TurnState.QUEUED, TurnState.RUNNING, TurnState.PREEMPTED}),
        TurnState.ABORTED,
    ),
}
"""Every transition of an open turn: from which states, to which."""


def as_tokens(tokens: Iterable[int], vocab_size: int, most: int) -> array[int]:
    """Read token ids, no more than `most` and one, and check them against the vocabulary. Raises `ContextExceeded` if
    there are more, `InvalidRequest` if they are no ids or reading them raises."""
    if isinstance(tokens, (str, bytes, bytearray)):
        raise InvalidRequest(f"input tokens are not token ids: {shown(tokens)}; allowed: a sequence of them")
    sized = type(tokens) in (list, tuple, array)  # what else has a length may be wrong about it
    try:
        checked = array("i", tokens[: most + 1] if sized else islice(tokens, most + 1))  # type: ignore[index]
    except Exception as error:
        raise InvalidRequest(f"input tokens are not token ids: {_described(error)}") from error
    if len(checked) > most:
        found = str(len(tokens)) if sized else f"more than {most}"  # type: ignore[arg-type]
        raise ContextExceeded(f"input has {found} tokens; allowed: {most}, which is all that can fit")
    ids = np.frombuffer(checked, np.intc)
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = next(t for t in checked if not 0 <= t < vocab_size)
        raise InvalidRequest(f"input has token id {wrong}; allowed: 0 to {vocab_size - 1}", param="input")
    return checked


def _described(error: Exception) -> str:
    """What a caller's object raised, which may be an exception of its own."""
    with suppress(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
