"""Compiles grammars to constraints with llguidance. This takes milliseconds, sometimes seconds, so it must not run in
the engine's thread."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import thread_time

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from tenuto.base.checks import parsed_json
from tenuto.base.errors import InvalidRequest
from tenuto.base.plan import Words
from tenuto.base.tools.grammar import NOT_JSON, Grammar, json_rule
from tenuto.text.bad_words import WithoutWords, spellings
from tenuto.text.compiled import CompiledGrammars, Growth
from tenuto.text.constraint import Constraint
from tenuto.text.tokenizer import Tokenizer

SHOWN = 400
"""Maximum length, in characters, of the library's message about a bad grammar."""
UNFORCED = '%llguidance {"no_forcing": true}\n'
"""Lets masks allow every token with which the text can go on. By default, where only one text may follow, the library
allows only the tokens to which it encodes that text."""
MAX_TOKEN_BYTES = 1000
"""Longer tokens, which the library does not support, are never allowed in text that follows a grammar."""


class GrammarMatcher:
    """A `Matcher` implemented by llguidance."""

    __slots__ = ("_control", "_growth", "_matcher")

    def __init__(self, matcher: LLMatcher, growth: Growth, control: Words | None = None) -> None:
        """`growth`: that of the automaton, which all copies share. `control`: the mask of all control tokens, if the
        grammar names any. Where text may continue or end with a control token, the library's mask allows every control
        token, so `fill` checks each."""
        self._matcher = matcher
        self._growth = growth
        self._control = control

    @property
    def failure(self) -> str:
        return _brief(self._matcher.get_error())

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def consume(self, token: int) -> bool:
        return self._matcher.consume_token(token)

    def fill(self, words: Words) -> None:
        began = thread_time()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._control is not None:
            self._try(words, self._control)
        self._growth.add(thread_time() - began)

    def _try(self, words: Words, control: Words) -> None:
        for token in np.flatnonzero(np.unpackbits((words & control).view(np.uint8), bitorder="little")).tolist():
            if not self._matcher.validate_tokens([token]):
                words[token // 32] &= ~np.uint32(1 << token % 32)

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._growth, self._control)


class GrammarCompiler:
    """Compiles grammars to constraints on the tokens of one model. Thread-safe.

    Invariant: `_compiled` holds, for each grammar, a matcher that never moves and the mask of the first token.
    `_control` is set together with `_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`end_ids`: the control tokens that end an answer; they are allowed where the text is complete."""
        self._tokenizer = tokenizer
        self._every = _mask_of_all(vocab_size)
        self._make = partial(_tokens_of, tokenizer, vocab_size, end_ids)
        self._tokens: LLTokenizer | None = None  # made when first needed
        self._control = np.zeros(0, np.uint32)  # the mask of all control tokens
        self._compiled = CompiledGrammars[tuple[GrammarMatcher, Words]]()
        self._making = threading.Lock()

    def has(self, grammar: Grammar) -> bool:
        """Whether `grammar` is compiled already, so that `constraint` returns at once."""
        return grammar in self._compiled

    def constraint(self, grammar: Grammar | None, bad_words: Sequence[str] = ()) -> Constraint:
        """Returns a new constraint, of which one part may be missing. Raises `InvalidRequest` if the grammar is
        malformed, unsupported, or matches only the empty text."""
        matcher, first = None, None
        if grammar is not None:
            compiled, first = self._compiled.find(grammar) or self._compile(grammar)
            matcher = compiled.copy()
            if not bad_words:
                return Constraint(matcher, len(first), first)
        without = WithoutWords(spellings(bad_words, self._tokenizer), self._every, matcher)
        return Constraint(without, len(self._every))

    def _compile(self, grammar: Grammar) -> tuple[GrammarMatcher, Words]:
        with self._making:
            if self._tokens is None:
                self._tokens, control = self._make()
                self._control = _mask_of(control, -(-self._tokens.vocab_size // 32))
        began = thread_time()
        matcher = LLMatcher(self._tokens, UNFORCED + _SOURCES[grammar.kind](grammar), log_level=0, limits=LIMITS)
        growth = Growth(thread_time() - began, self._compiled.trim)
        names_control = grammar.kind in ("lark", "ebnf") and _NAMED.search(grammar.source) is not None
        made = GrammarMatcher(matcher, growth, self._control if names_control else None)
        first = np.zeros(-(-self._tokens.vocab_size // 32), np.uint32)
        if not matcher.is_error():
            made.fill(first)
        if matcher.is_error():
            raise InvalidRequest(
                f"the {_NAMES[grammar.kind]} is refused: {_brief(matcher.get_error())}", param="grammar"
            )
        if matcher.is_stopped() or not (first & ~_mask_of(self._tokens.eos_tokens, len(first))).any():
            raise InvalidRequest(f"the {_NAMES[grammar.kind]} allows no text but the empty one", param="grammar")
        self._compiled.keep(grammar, (made, first), growth)
        return made, first


_NAMED = re.compile(r"<[\[|]")
"""Matches where a grammar may name a control token."""
LIMITS = LLParserLimits(verbose_errors=False)
"""The library's default limits: a mask costs at most about 15 ms, and an automaton takes at most some 100 MB."""

_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "grammar of JSON objects",
    "regex": "regular expression",
    "choice": "list of choices",
    "ebnf": "EBNF grammar",
    "lark": "Lark grammar",
}


def _schema(grammar: Grammar) -> str:
    schema = parsed_json(NOT_JSON, grammar.source, "grammar")
    return f"start: {json_rule({} if schema is True else schema)}"


def _ebnf(grammar: Grammar) -> str:
    try:
        return gbnf_to_lark(grammar.source)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise InvalidRequest(f"the EBNF grammar is refused: {_brief(str(error))}", param="grammar") from None


def _regex(source: str) -> str:
    """Returns a Lark grammar for a regular expression."""
    made = json.loads(LLMatcher.grammar_from_regex(source))
    return str(made["grammars"][0]["lark_grammar"])


def _choice(grammar: Grammar) -> str:
    return _regex("|".join(map(_literal, grammar.choices())))


def _literal(text: str) -> str:
    """Returns an expression that matches exactly `text`."""
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)


_SOURCES: dict[str, Callable[[Grammar], str]] = {
    "json_schema": _schema,
    "json_object": lambda _: f"start: {json_rule({'type': 'object'})}",
    "regex": lambda grammar: _regex(grammar.source),
    "choice": _choice,
    "ebnf": _ebnf,
    "lark": lambda grammar: grammar.source,
}
"""For each kind, a function that returns the grammar as Lark rules."""


def _brief(error: str) -> str:
    """Returns the library's error message without its excerpts of the grammar and traces, cut to `SHOWN` characters."""
    text = " ".join(error.partition("<")[0].split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _mask_of(tokens: Sequence[int], words: int) -> Words:
    mask = np.zeros(words, np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


def _mask_of_all(tokens: int) -> Words:
    """Returns the mask of the first `tokens` tokens."""
    mask = np.full(-(-tokens // 32), 0xFFFFFFFF, np.uint32)
    mask[-1] >>= -tokens % 32
    return mask


class _Tokens(TokenizerWrapper):
    """A tokenizer with llguidance's interface. Control tokens and tokens of more than `MAX_TOKEN_BYTES` have no bytes,
    so text in a grammar never matches them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end: int) -> None:
        self.is_tokenizer_wrapper = True  # required by the library
        self.bos_token_id = None
        self.eos_token_id = end
        texts = map(tokenizer.token_bytes, range(vocab_size))
        self.tokens = [raw if len(raw) <= MAX_TOKEN_BYTES else b"" for raw in texts]
        self.special_token_ids = [token for token, raw in enumerate(self.tokens) if not raw]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


def _tokens_of(tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> tuple[LLTokenizer, Sequence[int]]:
    """Returns the library's tokenizer and the control tokens."""
    ends = [token for token in dict.fromkeys(end_ids) if token < vocab_size]
    if not ends:  # the library requires one: add a token that the model does not have
        vocab_size += 1
        ends = [vocab_size - 1]
    tokens = _Tokens(tokenizer, vocab_size, ends[0])
    return LLTokenizer(tokens, n_vocab=vocab_size, eos_token=list(ends)), tokens.special_token_ids
