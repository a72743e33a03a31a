"""The tokens of a session, with who made each: for trainers."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import Any, Self

import msgspec
import numpy as np

from tenuto.base.turns import OutputSpan
from tenuto.base.views import View


class ForkedAt(View, frozen=True, kw_only=True):
    """The other session of a fork, `session`, and where the two part: after the first `turn` turns, of which the last
    may have been cut, which have `position` tokens. `open`: whether the other session is open."""

    session: str
    turn: int
    position: int
    open: bool


class StateSpan(View, frozen=True, kw_only=True):
    """Tokens whose state in memory was computed with the same weights: from `start` to where the next span begins."""

    start: int
    weight_version: str


class TurnTokens(View, frozen=True, kw_only=True):
    """The tokens of a committed turn. `output_ids` were sampled, `input_ids` were not. `logprobs`: of the output
    tokens, if the turn asked for log-probabilities. `seed`: with which they were sampled; `None` if they are the
    likeliest tokens. `weight_versions`: the weights that sampled them; without output, those in use at the turn's end;
    empty if it is not known, for a turn that was computed elsewhere or before servers recorded it."""

    turn: int
    input_ids: list[int]
    output_ids: list[int]
    logprobs: list[float] | None
    seed: int | None
    weight_versions: list[OutputSpan]


class SessionTokens(View, frozen=True, kw_only=True):
    """A session's committed tokens at one moment. `version`: the session's. `weight_version`: that of the weights in
    use. `state`: the weights that computed the state of the first `computed_tokens` tokens, which is in memory.
    `parent`: the session from which it was forked; `children`: its open forks."""

    session: str
    version: int
    weight_version: str
    computed_tokens: int
    state: list[StateSpan]
    turns: list[TurnTokens]
    parent: ForkedAt | None
    children: list[ForkedAt]

    @property
    def token_ids(self) -> list[int]:
        """All tokens in order."""
        return list(chain.from_iterable((*turn.input_ids, *turn.output_ids) for turn in self.turns))

    @classmethod
    def of(cls, packed: PackedTokens) -> Self:
        """Returns packed tokens as lists."""
        tokens, turns = array("i", packed.tokens), list[TurnTokens]()
        at = 0
        for turn in packed.turns:
            middle, end = at + turn.input_tokens, at + turn.input_tokens + turn.output_tokens
            logprobs = array("f", turn.logprobs).tolist() if turn.logprobs is not None else None
            turns.append(
                TurnTokens(
                    turn=turn.turn,
                    input_ids=tokens[at:middle].tolist(),
                    output_ids=tokens[middle:end].tolist(),
                    logprobs=logprobs,
                    seed=turn.seed,
                    weight_versions=turn.weight_versions,
                )
            )
            at = end
        return cls(**{**_rest(packed), "turns": turns})

    def packed(self) -> PackedTokens:
        """Returns these tokens packed."""
        turns = [
            PackedTurn(
                turn=turn.turn,
                input_tokens=len(turn.input_ids),
                output_tokens=len(turn.output_ids),
                logprobs=array("f", turn.logprobs).tobytes() if turn.logprobs is not None else None,
                seed=turn.seed,
                weight_versions=turn.weight_versions,
            )
            for turn in self.turns
        ]
        return PackedTokens(**{**_rest(self), "turns": turns, "tokens": array("i", self.token_ids).tobytes()})


class PackedTurn(View, frozen=True, kw_only=True):
    """See `TurnTokens`; `logprobs`: float32 [output_tokens]."""

    turn: int
    input_tokens: int
    output_tokens: int
    logprobs: bytes | None
    seed: int | None
    weight_versions: list[OutputSpan]


class PackedTokens(View, frozen=True, kw_only=True):
    """See `SessionTokens`; `tokens`: int32, of all turns in order."""

    session: str
    version: int
    weight_version: str
    computed_tokens: int
    state: list[StateSpan]
    turns: list[PackedTurn]
    parent: ForkedAt | None
    children: list[ForkedAt]
    tokens: bytes

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns a row for each token, as columns. `position`, int64; `token_id` and `turn`, int32; `sampled`, bool;
        `logprob`, float32, NaN where it is not known; `seed`, int64, -1 where there is none; `weight_version`, indices
        of `names`, int32, -1 for tokens that were not sampled or if it is not known."""
        tokens = np.frombuffer(self.tokens, np.int32)
        counts = np.array([(turn.input_tokens, turn.output_tokens) for turn in self.turns], np.int64).reshape(-1, 2)
        owner = np.repeat(np.arange(len(self.turns)), counts.sum(axis=1))
        sampled = np.repeat(np.tile([False, True], len(self.turns)), counts.ravel())
        logprobs = np.full(len(tokens), np.nan, np.float32)
        versions, names = np.full(len(tokens), -1, np.int32), {name: i for i, name in enumerate(self.names)}
        end = 0
        for turn in self.turns:
            begin, end = end + turn.input_tokens, end + turn.input_tokens + turn.output_tokens
            if turn.logprobs is not None:
                logprobs[begin:end] = np.frombuffer(turn.logprobs, np.float32)
            first = begin
            for span in turn.weight_versions:
                versions[first : begin + span.output_tokens] = names[span.weight_version]
                first = begin + span.output_tokens
        seeds = np.array([turn.seed if turn.seed is not None else -1 for turn in self.turns], np.int64)
        return {
            "position": np.arange(len(tokens), dtype=np.int64),
            "token_id": tokens,
            "turn": np.array([turn.turn for turn in self.turns], np.int32)[owner],
            "sampled": sampled,
            "logprob": logprobs,
            "seed": np.where(sampled, seeds[owner], -1),
            "weight_version": versions,
        }

    @property
    def names(self) -> list[str]:
        """The versions of all weights that have sampled tokens."""
        return list(dict.fromkeys(span.weight_version for turn in self.turns for span in turn.weight_versions))

    def about(self) -> dict[str, Any]:
        """Returns all that is not about single tokens, as JSON values."""
        return {name: msgspec.to_builtins(value) for name, value in _rest(self).items() if name != "turns"}


def _rest(tokens: SessionTokens | PackedTokens) -> dict[str, Any]:
    return {name: getattr(tokens, name) for name in SessionTokens.__struct_fields__}
