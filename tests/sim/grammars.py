"""Grammars of turns in the simulator, compiled by the real library for the simulator's tokens.

A turn's expected output is found with a separate matcher that only moves forward; whether a text belongs to a grammar
is decided without the library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import cache
from random import Random

import numpy as np
from llguidance import LLMatcher

from tenuto.base.options import TurnParams
from tenuto.base.plan import TokenMasks, Words
from tenuto.base.tools.grammar import Grammar
from tenuto.text.constraint import Constraint
from tenuto.text.grammars import GrammarCompiler
from tenuto.text.masks import MaskRequest
from tests.sim.letters import EOS, TOKEN_BYTES, VOCAB

SLOW = 0.1
"""The probability that a mask is marked as slow."""

OPEN = Grammar("regex", "(ab|b)+( (c|é|€)*)?")
FIXED = Grammar("regex", "([bc]{2} ){4}")
NESTED = Grammar("lark", 'start: "b" start? "c" | "b" start? " " start?')
CHOICE = Grammar.of_choice(("bca", "bcab cc", "b é", "cc€€c", "c b"))
DEAD_END = Grammar("regex", "[bc]{1,6}(d| [bc]*)")
"""After six characters only "d" or a space is allowed, and no token contains "d"; before that, any may follow."""
GRAMMARS = (OPEN, OPEN, FIXED, NESTED, NESTED, CHOICE, DEAD_END, Grammar("regex", "[bc]{1,6}d"))
"""Outputs of the last can never be completed."""

_EXPRESSIONS = {
    grammar: re.compile(grammar.source if grammar.kind == "regex" else "|".join(grammar.choices()))
    for grammar in GRAMMARS
    if grammar.kind in ("regex", "choice")
}


class _Tokens:
    """The part of a tokenizer that a compiler needs. To grammars, the end-of-answer token is a control token."""

    @staticmethod
    def token_bytes(token: int) -> bytes:
        return b"" if token == EOS else TOKEN_BYTES[token]

    @staticmethod
    def encode(text: str) -> list[int]:
        """Encodes greedily by the longest token; bytes that begin no token are dropped."""
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
def _beginning(grammar: Grammar) -> LLMatcher:
    """Returns a new matcher of the library, which the engine does not share."""
    matcher, _ = GrammarCompiler(_Tokens(), VOCAB, (EOS,))._compile(grammar)  # type: ignore[arg-type]
    return matcher._matcher


def constraint_of(params: TurnParams) -> Constraint | None:
    """Returns the constraint that the engine's intake would make."""
    return _compiler().constraint(params.grammar, params.bad_words) if params.constrained else None


class Follower:
    """The position of one turn's output in its grammar, and what else limits the next token. It never moves back."""

    def __init__(self, params: TurnParams) -> None:
        self._params = params
        self._output: list[int] = []
        self._matcher: LLMatcher | None = None
        if params.grammar is not None:
            self._matcher = _beginning(params.grammar).deep_copy()
        self._bad = [
            tuple(tokens)
            for word in params.bad_words
            for text in (word, f" {word}")
            if (tokens := _Tokens.encode(text))
        ]

    def copy(self) -> Follower:
        other = Follower(self._params)
        other._output = list(self._output)
        other._matcher = self._matcher.deep_copy() if self._matcher is not None else None
        return other

    def allowed(self) -> Words:
        """Returns the tokens that may come next; none if the library cannot continue."""
        words = np.full(1, 2**VOCAB - 1, np.uint32)
        if self._matcher is not None:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            words[0] *= not self._matcher.is_error()
        only = self._params.sampling.allowed_ids
        left_out = [token for token in range(VOCAB) if self._is_bad(token) or (only and token not in only)]
        words[0] &= ~np.uint32(sum(1 << token for token in left_out))
        return words

    def _is_bad(self, token: int) -> bool:
        after = (*self._output, token)
        return any(after[-len(bad) :] == bad for bad in self._bad)

    def take(self, token: int) -> bool:
        """Advances by a token; returns False if it is not allowed."""
        if self._is_bad(token):
            return False
        self._output.append(token)
        return self._matcher is None or (not self._matcher.is_error() and self._matcher.consume_token(token))

    @property
    def complete(self) -> bool:
        return self._matcher is not None and self._matcher.is_stopped()

    def legal(self, output: Sequence[int], *, whole: bool) -> bool:
        """Returns whether the output has no bad words, and a `whole` one is a text of the grammar, decided without the
        library. Of a partial output only the characters are checked."""
        text = "".join(f"{token}," for token in output)
        if any(f",{text}".find("," + "".join(f"{token}," for token in bad)) >= 0 for bad in self._bad):
            return False
        return self._params.grammar is None or self._follows(self._params.grammar, output, whole=whole)

    def _follows(self, grammar: Grammar, output: Sequence[int], *, whole: bool) -> bool:
        ended = output[-1:] == [EOS]
        raw = b"".join(_Tokens.token_bytes(token) for token in output)
        if not (whole or ended):
            return raw.decode(errors="replace").rstrip("\ufffd").strip("abcd é€") == "" and EOS not in output
        text = raw.decode()
        if grammar == NESTED:
            return is_nested(text)
        return _EXPRESSIONS[grammar].fullmatch(text) is not None


def is_nested(text: str) -> bool:
    """Returns whether the text belongs to `NESTED`: each level ends with "c", or with a space and an optional inner
    level."""
    return _nested_ends(text, 0) >= {len(text)}


def _nested_ends(text: str, start: int) -> set[int]:
    """Returns the ends of all texts of `NESTED` that begin at `start`."""
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
    """Carries out requests at any time before their answers are needed, in any order, as threads may. It marks some of
    them as slow."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._waiting: list[MaskRequest] = []
        self.were_slow: set[Constraint] = set()  # in this step; they may be fast by now

    def ask(self, requests: Sequence[MaskRequest]) -> None:
        self._waiting += requests
        self.go_on()

    def go_on(self) -> None:
        """Carries out some of the requests."""
        self._carry_out([request for request in self._waiting if self._rng.random() < 0.5])

    def require(self, masks: Iterable[TokenMasks]) -> None:
        """Carries out the requests whose answers are needed now."""
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
