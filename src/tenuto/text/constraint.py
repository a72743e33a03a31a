"""A turn's grammar while the turn runs: how far its output has come in it, and what may follow."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

import numpy as np

from tenuto.base.plan import Words

SLOW_SECONDS = 0.005
"""A constraint whose last mask took longer is slow: others should not have to wait for it."""


class Matcher(Protocol):
    """Follows tokens through a grammar. None of this raises: a matcher that cannot go on says so in `failure`."""

    @property
    def failure(self) -> str:
        """Why it cannot go on; empty if it can."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the text is one of the grammar's and nothing may follow."""
        ...

    def consume(self, token: int) -> bool:
        """Go on by a token. False if it may not come here; then there is a `failure`."""
        ...

    def fill(self, words: Words) -> None:
        """Set bit `token % 32` of `words[token // 32]` for every token that may come next, and clear all others."""
        ...

    def copy(self) -> Matcher:
        """Another one that stands where this one does; neither moves the other."""
        ...


class Constraint:
    """What a turn's output has to follow. The engine's thread pushes what has been settled; another computes masks.

    Invariant: the matcher stands at the end of the turn's settled output; under `_lock`. It never goes back: guesses
    are followed on copies, an aborted turn gives its constraint up, and a preempted one keeps its output and with it
    its constraint.
    """

    __slots__ = ("_lock", "_matcher", "_next", "_stuck", "_words", "failure", "slow")

    def __init__(self, matcher: Matcher, words: int, first: Words | None = None) -> None:
        """`words`: of a mask. `first`: the mask of the first token, if it is known."""
        self._matcher = matcher
        self._words = words
        self._next = first  # the mask of the next token, once it is known
        self._stuck = False  # there can be none; both under `_lock`
        self._lock = threading.Lock()
        self.failure = ""  # why the turn cannot go on; written by the engine's thread
        self.slow = False  # written by whoever computes masks

    @property
    def ready(self) -> bool:
        """Whether the mask of the next token takes no time."""
        return self._next is not None or self._stuck

    def push(self, token: int) -> bool:
        """Take in an output token. True if the text is complete. A token that may not come here is a `failure`."""
        with self._lock:
            self._next = None
            if self._stuck or not self._matcher.consume(token):
                self.failure = self._matcher.failure or "no token of the model can continue the text"
                return False
            return self._matcher.complete

    def masks(self, guesses: Sequence[int]) -> Words | None:
        """What may come next, and after each of the guesses: uint32 [1 + guesses, words]. After a guess that may not
        come, or completes the text, or after which nothing may come, anything may: what is sampled there is not looked
        at, or fails. `None` if the grammar turns out to be too complex, or no token may come; the next `push` fails."""
        began = perf_counter()
        with self._lock:
            masks = np.full((1 + len(guesses), self._words), 0xFFFFFFFF, np.uint32)
            if self._next is not None:
                masks[0] = self._next
            else:
                self._matcher.fill(masks[0])
            self._stuck = bool(self._matcher.failure) or not masks[0].any()
            if self._stuck:
                return None
            self._next = masks[0].copy()
            if guesses:
                self._follow(guesses, masks[1:])
        self.slow = perf_counter() - began > SLOW_SECONDS
        return masks

    def _follow(self, guesses: Sequence[int], masks: Words) -> None:
        """Fill the masks, [guesses, words], of what may come after each of the guesses, as far as that can be said."""
        ahead = self._matcher.copy()
        for guess, mask in zip(guesses, masks, strict=True):
            if not ahead.consume(guess) or ahead.complete:
                return
            found = np.zeros_like(mask)
            ahead.fill(found)
            if ahead.failure:
                return
            mask[:] = found
