"""The results of a model's forward pass, from which tokens are sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from tenuto.base.plan import Ints
from tenuto.kernels.sampling import Choice, Masks

Longs = npt.NDArray[np.int64]
Singles = npt.NDArray[np.float32]


class Logits(Protocol):
    """Logits, float32 [outputs, vocab], on the model's device; an output is a token after which logits were computed.
    Arguments and results of methods are on the host. Valid until the next step."""

    def __len__(self) -> int: ...

    def __getitem__(self, outputs: slice) -> Self:
        """Returns a view of some outputs."""

    def copy(self, outputs: Longs) -> Self:
        """Returns a copy of some outputs."""

    def at(self, outputs: Longs, tokens: Longs) -> Singles:
        """Returns the logits of `tokens[i]` in `outputs[i]`, float32."""

    def put(self, outputs: Longs, tokens: Longs, values: Singles) -> None:
        """Sets the logit of `tokens[i]` in `outputs[i]` to `values[i]`; the pairs are all different."""

    def sample(self, choice: Choice, masks: Masks | None = None) -> Longs:
        """Samples like the reference, `kernels.torch_sampling.sample`, after `torch_sampling.mask` if there are masks.
        Returns the tokens, int64 [outputs]. May change the logits."""

    def score(self, tokens: Longs, most: int) -> tuple[Singles, Longs, Singles]:
        """Returns the log-probabilities of `tokens`, int64 [outputs], and ids and log-probabilities of the `most`
        likeliest tokens, like the reference, `kernels.torch_sampling.score`."""

    def host(self) -> Singles:
        """Returns a copy of all logits on the host."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Logits and, if the forward pass finds it at no further cost, the likeliest token of each output, int32 [outputs];
    ties go to the lowest id. There may be no logits, of length 0, if only the likeliest tokens are wanted. `vectors`:
    the sums of `Plan.vectors`, if there are any, float32 [sums, hidden]."""

    logits: Logits
    best: Ints | None = None
    vectors: Singles | None = None
