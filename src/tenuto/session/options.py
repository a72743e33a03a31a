"""What callers write, checked and turned into what the engine takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from tenuto.base.checks import items
from tenuto.base.errors import InvalidRequest
from tenuto.base.sampling import Sampling
from tenuto.session.turn import TurnParams


class TurnOptions(TypedDict, total=False):
    """Options of a turn, all optional.

    `max_new_tokens`: as many as fit if not given. `temperature` 0 (the default) is greedy; `top_k` 0, `top_p` 1 and
    `min_p` 0 keep every token; the penalties and `logit_bias` (token id to number) are 1, 0, 0 and none. `seed`: turns
    with the same seed at the same position draw the same. `base.sampling.Sampling` says what each does. `stop`: strings
    that end the turn; `stop_ids`: token ids that do, besides the model's own unless `ignore_eos`; none does before
    there are `min_new_tokens`. `logprobs` and `input_logprobs` n: log-probabilities of every output or input token, and
    the n likeliest there. `priority`: higher runs first; the session's if not given. `queue_timeout` and `timeout`:
    seconds until the turn must have started, and ended.
    """

    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    stop: str | Sequence[str]
    stop_ids: Sequence[int]
    ignore_eos: bool
    priority: int | None
    queue_timeout: float | None
    timeout: float | None
    min_new_tokens: int
    logprobs: int | None
    input_logprobs: int | None


_SAMPLING = frozenset(field.name for field in fields(Sampling))


def turn_params(options: TurnOptions) -> TurnParams:
    """Raises `InvalidRequest` for a name that is no option, and for values out of range."""
    unknown = options.keys() - TurnOptions.__annotations__.keys()
    if unknown:
        raise InvalidRequest(f"unknown turn options {sorted(unknown)}; allowed: {sorted(TurnOptions.__annotations__)}")
    rest: dict[str, Any] = dict(options)
    sampling: dict[str, Any] = {name: rest.pop(name) for name in _SAMPLING & rest.keys()}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _pairs(sampling["logit_bias"])
    stop = rest.pop("stop", ())
    return TurnParams(
        sampling=Sampling(**sampling),
        stop=(stop,) if isinstance(stop, str) else items("stop", stop, "a string or a list of strings"),
        stop_ids=items("stop_ids", rest.pop("stop_ids", ()), "a list of token ids"),
        **rest,
    )


def _pairs(logit_bias: object) -> tuple[tuple[int, float], ...]:
    """The entries of a mapping or of a collection of pairs."""
    pairs = logit_bias.items() if isinstance(logit_bias, Mapping) else logit_bias
    allowed = "a mapping from token ids to numbers, or pairs"
    return tuple(items("a logit_bias entry", pair, "a pair") for pair in items("logit_bias", pairs, allowed))
