"""System messages in conversations of other servers' clients, which put them anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tenuto.base.tools.definitions import ModelHabits
from tenuto.base.turns import Message
from tenuto.serve.shared.undone import leave_undone


def placed(messages: Sequence[Message], habits: ModelHabits) -> list[Message]:
    """The messages as the model's template can write them. If it writes no system message after others, those that
    open the conversation become one, and later ones become text of the user's."""
    if habits.late_system:
        return list(messages)
    placed: list[Message] = []
    told = False  # the last of them is only what systems said
    for message in messages:
        last = placed[-1] if placed else None
        if message.role == "system" and all(one.role == "system" for one in placed):
            placed = [joined(last, message) if last is not None else message]
        elif message.role == "system":
            leave_undone("messages.role.system")
            told = told or last is None or last.role != "user"
            if last is not None and last.role == "user":
                placed[-1] = joined(last, message)
            else:
                placed.append(Message("user", message.content))
        elif told and last is not None and message.role == "user":
            placed[-1], told = joined(last, message), False
        else:
            placed.append(message)
            told = False
    return placed


def joined(first: Message, second: Message) -> Message:
    """The first message, which goes on with the second's text."""
    return replace(first, content=f"{first.content}\n\n{second.content}")
