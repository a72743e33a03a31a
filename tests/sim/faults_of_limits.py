"""Planted faults of turns that limit or name tokens. See `faults`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tenuto.base.plan import RowSampling
from tenuto.sched import batch
from tenuto.session.turn import Turn
from tenuto.text import grammars
from tenuto.text.bad_words import WithoutWords
from tests.sim.faults import replaced


def rejected_guesses_stay_before_bad_words() -> Any:
    """Tokens of wrong guesses count as output before a bad word."""
    return replaced(WithoutWords, "copy", lambda original: lambda self: self)


def bad_words_are_found_by_their_last_two_tokens() -> Any:
    """Of the tokens of a bad word, all but the last two are ignored."""

    def make(original: Any) -> Any:
        def started(self: WithoutWords, sequences: Any, *more: Any) -> None:
            original(self, [sequence[-2:] for sequence in sequences], *more)

        return started

    return replaced(WithoutWords, "__init__", make)


def bad_words_have_no_blank_before_them() -> Any:
    """Words are refused only as they are spelled."""

    def make(_: Any) -> Any:
        return lambda words, tokenizer: [tuple(found) for word in words if (found := tokenizer.encode(word))]

    return replaced(grammars, "spellings", make)


def _resumed_with(change: Callable[[RowSampling], RowSampling]) -> Any:
    """The row of a turn that goes on after a preemption gets changed options."""

    def make(original: Any) -> Any:
        def row_sampling(turn: Turn, *more: Any) -> RowSampling:
            made: RowSampling = original(turn, *more)
            return change(made) if turn.output else made

        return row_sampling

    return replaced(batch, "row_sampling", make)


def resumed_turns_may_sample_any_token() -> Any:
    """A turn that was preempted loses its allowed ids."""
    return _resumed_with(lambda row: replace(row, sampling=replace(row.sampling, allowed_ids=())))


def resumed_turns_name_no_tokens() -> Any:
    """A turn that was preempted loses its named ids."""
    return _resumed_with(lambda row: replace(row, named=()))


FAULTS_OF_LIMITS = (
    rejected_guesses_stay_before_bad_words,
    bad_words_are_found_by_their_last_two_tokens,
    bad_words_have_no_blank_before_them,
    resumed_turns_may_sample_any_token,
    resumed_turns_name_no_tokens,
)
