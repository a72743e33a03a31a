"""Grammars of turns in the simulator, compiled by the real library for the tokens of the simulator.

What a turn says alone is found with a matcher of its own that only goes forward; what is a text of a grammar, without
the library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import cache
from random import Random

import numpy as np
from llguidance import LLMatcher

from tenuto.base.grammar import Grammar
from tenuto.base.options import TurnParams
from tenuto.base.plan import TokenMasks, Words
from tenuto.text.constraint import Constraint
from tenuto.text.grammars import GrammarCompiler
from tenuto.text.masks import MaskRequest
from tests.sim.letters import EOS, TOKEN_BYTES, VOCAB

SLOW = 0.1
"""How often a mask is said to have taken long."""

OPEN = Grammar("regex", "(ab|b)+( (c|é|€)*)?")
FIXED = Grammar("regex", "([bc]{2} ){4}")
NESTED = Grammar("lark", 'start: "b" start? "c" | "b" start? " " start?')
CHOICE = Grammar.of_choice(("bca", "bcab cc", "b é", "cc€€c", "c b"))
DEAD_END = Grammar("regex", "[bc]{1,6}(d| [bc]*)")
"""After six letters only "d" may come or a blank, and no token has the former; before, either may."""
GRAMMARS = (OPEN, OPEN, FIXED, NESTED, NESTED, CHOICE, DEAD_END, Grammar("regex", "[bc]{1,6}d"))
"""The last can never be completed."""

_EXPRESSIONS = {
    grammar: re.compile(grammar.source if grammar.kind == "regex" else "|".join(grammar.choices()))
    for grammar in GRAMMARS
    if grammar.kind in ("regex", "choice")
}


class _Tokens:
    """As much of a tokenizer as a compiler asks for. The token that ends an answer is a control token to grammars."""

    @staticmethod
    def token_bytes(token: int) -> bytes:
        return b"" if token == EOS else TOKEN_BYTES[token]

    @staticmethod
    def encode(text: str) -> list[int]:
        """The longest token each time; what no token begins with is left out."""
        raw, tokens = text.encode(), []
        while raw:
            fitting = [token for token in range(VOCAB) if token != EOS and raw.startswith(TOKEN_BYTES[token])]
            longest = max(fitting, key=lambda token: len(TOKEN_BYTES[token]))
            tokens += [longest] if TOKEN_BYTES[longest] else []
            raw = raw[max(1, len(TOKEN_BYTES[longest])) :]
        return tokens


@cache
def _compiler() -> GrammarCompiler:
    return GrammarCompiler(_Tokens(), VOCAB, (EOS,))  # type: ignore[arg-type]


@cache
def _beginning(grammar: Grammar) -> tuple[LLMatcher, int]:
    """A matcher of the library that nobody moves and no compiler of the engine's knows, and the words of a mask."""
    matcher, first = GrammarCompiler(_Tokens(), VOCAB, (EOS,))._compile(grammar)  # type: ignore[arg-type]
    return matcher._matcher, len(first)


def constraint_of(params: TurnParams) -> Constraint | None:
    """As the engine's intake makes it."""
    return _compiler().constraint(params.grammar) if params.grammar is not None else None


class Follower:
    """How far the output of one turn has come in its grammar. It never goes back."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        matcher, self._words = _beginning(grammar)
        self._matcher = matcher.deep_copy()

    def copy(self) -> Follower:
        other = Follower(self._grammar)
        other._matcher = self._matcher.deep_copy()
        return other

    def allowed(self) -> Words:
        """The tokens that may come next; none if the library cannot go on."""
        words = np.zeros(self._words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words if not self._matcher.is_error() else np.zeros_like(words)

    def take(self, token: int) -> bool:
        """Go on by a token; False if it may not come."""
        return not self._matcher.is_error() and self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def legal(self, output: Sequence[int], *, whole: bool) -> bool:
        """Whether the tokens stand for a text of the grammar, found without the library; unless it is the `whole` text,
        for letters that some text of it has."""
        ended = output[-1:] == [EOS]
        raw = b"".join(_Tokens.token_bytes(token) for token in output)
        if not (whole or ended):
            return raw.decode(errors="replace").rstrip("\ufffd").strip("abcd é€") == "" and EOS not in output
        text = raw.decode()
        if self._grammar == NESTED:
            return is_nested(text)
        return _EXPRESSIONS[self._grammar].fullmatch(text) is not None


def is_nested(text: str) -> bool:
    """Whether it is a text of `NESTED`: one that is closed by its own letter, or by a blank and what follows it."""
    return _nested_ends(text, 0) >= {len(text)}


def _nested_ends(text: str, start: int) -> set[int]:
    """Where the texts of `NESTED` end that begin at `start`."""
    if text[start : start + 1] != "b":
        return set()
    ends = set()
    for middle in {start + 1} | _nested_ends(text, start + 1):
        if text[middle : middle + 1] == "c":
            ends.add(middle + 1)
        elif text[middle : middle + 1] == " ":
            ends |= {middle + 1} | _nested_ends(text, middle + 1)
    return ends


class LateMasks:
    """Carries out requests at any time before their answers are needed, in any order, as threads may. Of some it says
    that they took long."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._waiting: list[MaskRequest] = []
        self.were_slow: set[Constraint] = set()  # in this step, and may not be any more

    def ask(self, requests: Sequence[MaskRequest]) -> None:
        self._waiting += requests
        self.go_on()

    def go_on(self) -> None:
        """Carry out some."""
        self._carry_out([request for request in self._waiting if self._rng.random() < 0.5])

    def require(self, masks: Iterable[TokenMasks]) -> None:
        """Carry out those whose answers are needed now."""
        needed: set[int] = {id(each.allowed) for each in masks}
        self._carry_out([request for request in self._waiting if id(request.answer) in needed])

    def _carry_out(self, requests: list[MaskRequest]) -> None:
        self._rng.shuffle(requests)
        for request in requests:
            self._waiting.remove(request)
            if request.constraint.slow:
                self.were_slow.add(request.constraint)
            request.carry_out()
            request.constraint.slow = self._rng.random() < SLOW

    def close(self) -> None:
        for request in self._waiting:
            answer: Future[Words | None] = request.answer
            answer.cancel()
        self._waiting.clear()
