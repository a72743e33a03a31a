"""The constraint that a grammar puts on a running turn: follows its output and computes which tokens may come next."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

import numpy as np

from tenuto.base.plan import Words

SLOW_SECONDS = 0.005
"""A constraint is slow if its last masks took longer. Masks of slow constraints are computed in a thread of their
own."""


class Matcher(Protocol):
    """Follows tokens through a grammar. No method raises; a matcher that cannot continue sets `failure`."""

    @property
    def failure(self) -> str:
        """Why the matcher cannot continue; empty if it can."""

    @property
    def complete(self) -> bool:
        """Whether the text matches the grammar and nothing may follow."""

    def consume(self, token: int) -> bool:
        """Advances by a token. Returns False and sets `failure` if the grammar does not allow it here."""

    def fill(self, words: Words) -> None:
        """Sets bit `token % 32` of `words[token // 32]` for every token that may come next, and clears all others."""

    def copy(self) -> Matcher:
        """Returns an independent matcher at the same position."""


class Constraint:
    """The constraint on one turn's output. The engine's thread pushes settled tokens; another thread computes masks.

    Invariant: the matcher is at the end of the turn's settled output; under `_lock`. It never moves back: guesses are
    followed on copies, an aborted turn drops its constraint, and a preempted turn keeps its output and its constraint.
    """

    __slots__ = ("_lock", "_matcher", "_next", "_stuck", "_words", "failure", "slow")

    def __init__(self, matcher: Matcher, words: int, first: Words | None = None) -> None:
        """`words`: the length of a mask. `first`: the mask of the first token, if it is known."""
        self._matcher = matcher
        self._words = words
        self._next = first  # the mask of the next token, once it is known
        self._stuck = False  # no token can come next; like `_next`, under `_lock`
        self._lock = threading.Lock()
        self.failure = ""  # why the turn cannot continue; written by the engine's thread
        self.slow = False  # written by the thread that computes masks

    @property
    def ready(self) -> bool:
        """Whether the mask of the next token is known already."""
        return self._next is not None or self._stuck

    def push(self, token: int) -> bool:
        """Advances by an output token. Returns True if the text is complete; sets `failure` if the token is not
        allowed."""
        with self._lock:
            self._next = None
            if self._stuck or not self._matcher.consume(token):
                self.failure = self._matcher.failure or "no token of the model can continue the text"
                return False
            return self._matcher.complete

    def masks(self, guesses: Sequence[int]) -> Words | None:
        """Returns the masks of the next token and of the token after each guess: uint32 [1 + guesses, words].

        After a guess that is not allowed, completes the text or cannot be continued, the masks allow every token: what
        is sampled there is dropped, or `push` refuses it. Returns None if no token may come next or the grammar is too
        complex; the next `push` then sets `failure`."""
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
        """Fills `masks`, [guesses, words], for the token after each guess, up to the first guess that cannot be
        continued."""
        ahead = self._matcher.copy()
        for guess, mask in zip(guesses, masks, strict=True):
            if not ahead.consume(guess) or ahead.complete:
                return
            found = np.zeros_like(mask)
            ahead.fill(found)
            if ahead.failure:
                return
            mask[:] = found
