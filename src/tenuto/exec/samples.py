"""The samples of a plan as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tenuto.base.plan import Plan
from tenuto.exec.logits import Longs
from tenuto.exec.token_counts import NO_GUESS


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a plan, as arrays [samples], int64 unless noted. `outputs`: index, among the step's tokens, of the
    token before the sample. `positions`: position of the sampled token in its sequence. `last`, bool: whether it is its
    row's last sample in this step. `guesses`: the token before the sample if it is a guess, otherwise `NO_GUESS`."""

    rows: Longs
    outputs: Longs
    positions: Longs
    last: npt.NDArray[np.bool_]
    guesses: Longs


def samples_of(plan: Plan) -> Samples:
    """Returns the samples of a plan, rows in its order."""
    of = np.arange(len(plan.rows)).repeat(plan.samples)  # indices of rows
    left = plan.samples.cumsum()[of] - np.arange(len(of))  # samples of the row from this one on
    outputs = plan.counts.cumsum()[of] - left
    return Samples(
        plan.rows[of].astype(np.int64),
        outputs,
        (plan.starts + plan.counts)[of] - left + 1,
        left == 1,
        np.where(left == plan.samples[of], NO_GUESS, plan.tokens[outputs]),
    )
