"""What callers write, checked and turned into what the engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from tenuto.base.checks import items
from tenuto.base.errors import InvalidRequest
from tenuto.base.sampling import Sampling
from tenuto.session.turn import TurnParams


class TurnOptions(TypedDict, total=False):
    """Options of a turn, all optional.

    `max_new_tokens`: as many as fit if not given. `temperature` 0 (the default) is greedy; `top_k` 0 and `top_p` 1 keep
    every token. `seed`: turns with the same seed at the same position draw the same. `stop`: strings that end the
    turn; `stop_ids`: token ids that do, besides the model's own unless `ignore_eos`. `priority`: higher runs first; the
    session's if not given. `queue_timeout` and `timeout`: seconds until the turn must have started, and ended.
    """

    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: str | Sequence[str]
    stop_ids: Sequence[int]
    ignore_eos: bool
    priority: int | None
    queue_timeout: float | None
    timeout: float | None


def turn_params(options: TurnOptions) -> TurnParams:
    """Raises `InvalidRequest` for a name that is no option, and for values out of range."""
    unknown = options.keys() - TurnOptions.__annotations__.keys()
    if unknown:
        raise InvalidRequest(f"unknown turn options {sorted(unknown)}; allowed: {sorted(TurnOptions.__annotations__)}")
    rest: dict[str, Any] = dict(options)
    sampling = Sampling(**{name: rest.pop(name) for name in ("temperature", "top_k", "top_p", "seed") if name in rest})
    stop = rest.pop("stop", ())
    return TurnParams(
        sampling=sampling,
        stop=(stop,) if isinstance(stop, str) else items("stop", stop, "a string or a list of strings"),
        stop_ids=items("stop_ids", rest.pop("stop_ids", ()), "a list of token ids"),
        **rest,
    )
