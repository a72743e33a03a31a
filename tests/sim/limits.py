"""Turns that limit the tokens of their output, or name tokens to be scored."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tenuto.base.options import TurnParams
from tests.sim.letters import VOCAB

BAD_WORDS = ("a", "c", "bb", "ab", "ba", "b b", "cc", "bca", "\u00e9", "\u20acc")


def limited(rng: Random, params: TurnParams) -> TurnParams:
    """Adds bad words, allowed ids and named ids to some turns."""
    if rng.random() < 0.4:
        params = replace(params, logprob_ids=tuple(rng.choices(range(VOCAB), k=rng.randint(1, 4))))
    if rng.random() < 0.4:
        return replace(params, bad_words=tuple(rng.sample(BAD_WORDS, rng.randint(1, 4))))
    if rng.random() < 0.5 and params.grammar is None and not params.min_new_tokens:
        only = tuple(rng.sample(range(VOCAB), rng.randint(1, 5)))
        return replace(params, sampling=replace(params.sampling, allowed_ids=only))
    return params
