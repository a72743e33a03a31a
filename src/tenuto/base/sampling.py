"""Options for choosing a turn's next token, and log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tenuto.base.checks import Bounds, check_options, items, option, real, whole, wrong
from tenuto.base.errors import InvalidRequest

MAX_TOKEN_ID = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_BIASES = 1024
MAX_LISTED = 1024
"""Maximum number of token ids in an option that lists some."""
MAX_BIAS = 100
MAX_LOGPROBS = 20
"""Maximum number of likeliest tokens per position whose log-probabilities a turn may request."""

LEAST_LOGPROB = -9999.0
"""Replaces every lower log-probability, also minus infinity, which JSON cannot express. OpenAI's value."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of one turn.

    Applied in this order, the first three to greedy turns too:

    1. `logit_bias`: pairs (token id, number to add to its logit), each id at most once.
    2. `repetition_penalty` divides positive logits, and multiplies others, of all tokens in history, input or output
       (Keskar et al., CTRL, arXiv:1909.05858); 1 changes nothing.
    3. `presence_penalty` is subtracted from the logits of all tokens in this turn's output, and `frequency_penalty` as
       many times as they occur in it.
    4. `temperature` divides the logits; 0 is greedy.
    5. `top_k` keeps this many of the likeliest tokens, 0 all.
    6. `top_p` keeps the likeliest that together have this share of the probability left by top-k, 1.0 all.
    7. `min_p` keeps those at least `min_p` times as likely as the likeliest, 0 all.

    If there are `allowed_ids`, the other tokens are left out after the penalties.

    The random draw of a token depends on `seed` and on the token's position in the sequence alone, so a turn that is
    preempted and resumed, or that shares a batch with others, draws the same numbers.
    """

    temperature: float = option(0.0, "0, the default, is greedy.", Bounds(0.0, 1e6))
    top_k: int = option(0, "0, the default, keeps all.", Bounds(0, MAX_TOKEN_ID))
    top_p: float = option(1.0, allowed=Bounds(0.0, 1.0, above=True))
    seed: int = option(0, "Made up by the server if not given.", Bounds(0, MAX_SEED), names={"sglang": "sampling_seed"})
    min_p: float = option(0.0, allowed=Bounds(0.0, 1.0))
    repetition_penalty: float = option(
        1.0, allowed=Bounds(0.01, 100.0), names=dict.fromkeys(("ollama", "llama.cpp"), "repeat_penalty")
    )
    presence_penalty: float = option(0.0, allowed=Bounds(-2.0, 2.0))
    frequency_penalty: float = option(0.0, allowed=Bounds(-2.0, 2.0))
    logit_bias: tuple[tuple[int, float], ...] = option((), "By token id.")
    allowed_ids: tuple[int, ...] = option(
        (), "The only token ids that are sampled; all if not given.", names={"openai": "allowed_token_ids"}
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.allowed_ids != ():
            object.__setattr__(self, "allowed_ids", listed("allowed_ids", self.allowed_ids, MAX_LISTED))
        if self.logit_bias != ():
            try:
                _check_bias(self.logit_bias)
            except InvalidRequest as error:
                error.param = "logit_bias"
                raise

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


GREEDY = Sampling()


class Candidate(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A token that may come next and the natural logarithm of its probability. `raw`: its bytes, not always complete
    UTF-8; empty inside an engine, which handles no text."""

    token: int
    logprob: float
    raw: bytes = b""


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The natural logarithm of a token's probability given what precedes it, the likeliest tokens in its place, in
    descending order, and those that the turn's `logprob_ids` name, in their order. Probabilities are the softmax of the
    model's own logits, before any sampling option, and their logarithms at least `LEAST_LOGPROB`. `raw`: as in
    `Candidate`."""

    token: int
    logprob: float
    top: tuple[Candidate, ...] = ()
    raw: bytes = b""
    named: tuple[Candidate, ...] = ()

    def with_bytes(self, raw: Callable[[int], bytes]) -> TokenLogprob:
        """Returns a copy with the bytes of its tokens, which `raw` returns."""

        def each(others: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
            return tuple(Candidate(other.token, other.logprob, raw(other.token)) for other in others)

        return TokenLogprob(self.token, self.logprob, each(self.top), raw(self.token), each(self.named))


def listed(name: str, ids: object, most: int) -> tuple[int, ...]:
    """Returns a list of token ids. Raises `InvalidRequest` if there are more than `most`, or one is not a token id."""
    given = items(name, ids, "a list of token ids")
    if len(given) > most:
        raise InvalidRequest(f"there are {len(given)} {name}; allowed: at most {most}", param=name)
    try:
        return tuple(whole(f"one of {name}", token, 0, MAX_TOKEN_ID) for token in given)
    except InvalidRequest as error:
        error.param = name
        raise


def _check_bias(logit_bias: object) -> None:
    if not isinstance(logit_bias, tuple):
        raise wrong("logit_bias", logit_bias, "a tuple of pairs")
    if len(logit_bias) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias has {len(logit_bias)} entries; allowed: at most {MAX_BIASES}")
    for pair in logit_bias:
        if len(items("a logit_bias entry", pair, "a token id and a number")) != 2:
            raise InvalidRequest("a logit_bias entry is not a pair; allowed: a token id and a number")
        whole("a logit_bias id", pair[0], 0, MAX_TOKEN_ID)
        real("a logit bias", pair[1], -MAX_BIAS, MAX_BIAS)
    if len({token for token, _ in logit_bias}) < len(logit_bias):
        raise InvalidRequest("logit_bias has a token id twice; allowed: each at most once")
