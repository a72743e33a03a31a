"""A turn's input as callers write it: text, token ids or chat messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from tenuto.base.errors import InvalidRequest
from tenuto.base.turns import Input, Message, TurnInput, turn_input
from tenuto.text.room import Room
from tenuto.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A turn's input: `tokens`, or `messages` still to be rendered. `text`: the caller gave the tokens as text."""

    tokens: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    text: bool = False


def parse_input(
    given: Input | TurnInput, tokenizer: Tokenizer | None, room: Room | None = None, last_token: int | None = None
) -> Prompt:
    """Parses a turn's input and encodes text. `last_token`: the last token of the history, if there is one. Raises
    `InvalidRequest` unless `given` is text, token ids or messages. Raises `ContextExceeded`, without encoding, if text
    or token ids certainly do not fit into `room`."""
    if isinstance(given, str):
        if tokenizer is None:
            raise InvalidRequest("text needs a tokenizer, and this engine has none; give token ids")
        if room is not None:
            room.require(tokenizer.least_tokens(given))
        return Prompt(tokens=tuple(tokenizer.encode(given, before=tokenizer.before(last_token))), text=True)
    parts = turn_input(given)
    if parts and isinstance(parts[0], Message):
        return Prompt(messages=cast("tuple[Message, ...]", parts))
    if room is not None:
        room.require(len(parts))
    return Prompt(tokens=cast("tuple[int, ...]", parts))
