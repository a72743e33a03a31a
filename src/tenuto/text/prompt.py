"""A turn's input as callers write it: text, token ids or chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tenuto.base.checks import items, whole
from tenuto.base.errors import InvalidRequest
from tenuto.base.sampling import MAX_TOKEN_ID
from tenuto.base.turns import Message, TurnInput
from tenuto.text.room import Room
from tenuto.text.tokenizer import Tokenizer

Input = str | Iterable[int] | Sequence[Mapping[str, str]]
"""A turn's input: text as it is, token ids, or chat messages (objects with `role` and `content`)."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A turn's input: `tokens`, or `messages` still to be rendered. `text`: the tokens were given as text."""

    tokens: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    text: bool = False


def parse_input(given: Input | TurnInput, tokenizer: Tokenizer | None, room: Room | None = None) -> Prompt:
    """Raises `InvalidRequest` if it is neither text, nor token ids, nor messages, and `ContextExceeded` if it is text,
    or token ids, and certainly does not fit into `room`; the text has not been encoded then."""
    if isinstance(given, str):
        if tokenizer is None:
            raise InvalidRequest("text needs a tokenizer, and this engine has none; give token ids")
        if room is not None:
            room.require(tokenizer.least_tokens(given))
        return Prompt(tokens=tuple(tokenizer.encode(given)), text=True)
    parts = items("input", given, "text, token ids, or a list of messages")
    if parts and isinstance(parts[0], Mapping | Message):
        return Prompt(messages=tuple(one if isinstance(one, Message) else Message.from_dict(one) for one in parts))
    if room is not None:
        room.require(len(parts))
    return Prompt(tokens=tuple(whole("a token id of the input", part, 0, MAX_TOKEN_ID) for part in parts))
