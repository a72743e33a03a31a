"""A step's use of the model's head for multi-token prediction."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from tenuto.base.plan import Ints, Plan, Predicted, Singles
from tenuto.exec.forward import Forward
from tenuto.exec.logits import Longs, Outputs
from tenuto.exec.row_options import RowOptions
from tenuto.exec.samples import Samples
from tenuto.exec.token_counts import NO_GUESS


def predict(
    forward: Forward, options: RowOptions, plan: Plan, samples: Samples, sampled: Ints, given: Ints
) -> Predicted | None:
    """Does the work of the plan's `predictor`, if it has one. `given`, int32 [tokens]: the ids of the step's tokens;
    `sampled`, int32 [samples]: what was sampled after them.

    A guess is drawn as the token that it guesses will be: from the head's logits, by the row's options and the same
    random number. So a row that is not greedy has more guesses right than with the likeliest tokens.
    """
    asked = plan.predictor
    if asked is None:
        return None
    ends = plan.counts.cumsum()
    following = np.append(given[1:], np.int32(0))
    following[ends - 1] = np.maximum(asked.following, 0)
    following[samples.outputs] = sampled
    forward.remember(plan, following)
    indices = np.flatnonzero(asked.guesses)
    if not len(indices):
        return None
    began = perf_counter()
    sources = np.array([_last_right(ends[i] - plan.samples[i], ends[i], given, following) for i in indices], np.int32)
    positions = sources + (plan.starts + plan.counts - ends)[indices]
    limits = np.minimum(asked.guesses[indices], _room(plan, forward.spec.page_size)[indices] - positions)
    shape = len(plan.rows), int(limits.max())
    tokens, chances = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    counts = np.zeros(len(plan.rows), np.int32)
    counts[indices] = limits
    last = following[sources]
    for number in range(shape[1]):
        rows = plan.rows[indices]
        outputs = forward.predict(rows, (positions + number).astype(np.int32), last, sources)
        last, chances[indices, number] = _guess(outputs, options, rows.astype(np.int64), positions + number + 2)
        tokens[indices, number] = last
        going = np.flatnonzero(limits > number + 1)
        indices, positions, limits, last = indices[going], positions[going], limits[going], last[going]
        sources = going.astype(np.int32)
    return Predicted(tokens, chances, counts, perf_counter() - began)


def _last_right(first: int, end: int, given: Ints, following: Ints) -> int:
    """Returns the index of the last of a row's tokens from index `first` to `end` that follows right guesses only."""
    while first + 1 < end and following[first] == given[first + 1]:
        first += 1
    return first


def _room(plan: Plan, page_size: int) -> Longs:
    """Returns the position where the pages of each row end, int64 [rows]."""
    ends = (plan.starts + plan.counts).astype(np.int64)
    return -(-ends // page_size) * page_size


def _guess(outputs: Outputs, options: RowOptions, rows: Longs, positions: Longs) -> tuple[Ints, Singles]:
    """Returns guesses of the tokens of `rows` at `positions`, both int64 [n], and their probabilities by the head.
    Penalties do not count earlier guesses. Ids that the turn does not allow may be guessed."""
    logits = outputs.logits
    if not options.plain(rows):
        options.edits.edit(logits, rows, positions, np.full(len(rows), NO_GUESS))
    elif outputs.best is not None and not options.draws(rows):
        return outputs.best, np.exp(logits.score(outputs.best.astype(np.int64), 0)[0])
    tokens = logits.copy(np.arange(len(rows))).sample(options.choice(rows, positions))
    return tokens.astype(np.int32), np.exp(logits.score(tokens, 0)[0])
