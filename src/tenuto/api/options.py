"""What callers write, checked and turned into what the engine takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypedDict

from tenuto.base.checks import shown, whole
from tenuto.base.errors import InvalidRequest
from tenuto.base.sampling import Sampling
from tenuto.session.turn import TurnParams
from tenuto.text.chat import Message
from tenuto.text.tokenizer import Tokenizer

Input = str | Iterable[int] | Sequence[Mapping[str, str]]
"""A turn's input: text as it is, token ids, or chat messages (objects with `role` and `content`)."""


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
        stop=(stop,) if isinstance(stop, str) else _items("stop", stop, "a string or a list of strings"),
        stop_ids=_items("stop_ids", rest.pop("stop_ids", ()), "a list of token ids"),
        **rest,
    )


def _items(name: str, value: object, allowed: str) -> tuple[Any, ...]:
    """`value` as a tuple, if it is a collection and neither text nor bytes. Raises `InvalidRequest`."""
    if not isinstance(value, str | bytes | bytearray | memoryview | Mapping) and isinstance(value, Iterable):
        with suppress(TypeError):  # an array without dimensions says that it is iterable, and is not
            return tuple(value)
    raise InvalidRequest(f"{name} is {shown(value)}; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A turn's input: `tokens`, or `messages` still to be rendered. `text`: the tokens were given as text."""

    tokens: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    text: bool = False


def parse_input(given: Input, tokenizer: Tokenizer | None) -> Prompt:
    """Raises `InvalidRequest` if it is neither text, nor token ids, nor messages."""
    if isinstance(given, str):
        if tokenizer is None:
            raise InvalidRequest("text needs a tokenizer, and this engine has none; give token ids")
        return Prompt(tokens=tuple(tokenizer.encode(given)), text=True)
    items = _items("input", given, "text, token ids, or a list of messages")
    if items and isinstance(items[0], Mapping):
        return Prompt(messages=tuple(Message.from_dict(item) for item in items))
    return Prompt(tokens=tuple(whole("a token id of the input", item, 0, 2**31 - 1) for item in items))
