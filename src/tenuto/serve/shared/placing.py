"""Placement of system messages: clients of other servers may put them anywhere in a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tenuto.base.tools.definitions import ModelHabits
from tenuto.base.turns import Message
from tenuto.serve.shared.undone import leave_undone


def placed(messages: Sequence[Message], habits: ModelHabits, *, begun: bool = False) -> list[Message]:
    """Returns messages that the model's template can write. If it accepts a system message only at the beginning, those
    that open the conversation are joined, and later ones become user messages. `begun`: the messages continue a
    conversation."""
    if habits.late_system:
        return list(messages)
    placed: list[Message] = []
    told = False  # the last message has only the text of system messages
    for message in messages:
        last = placed[-1] if placed else None
        if message.role == "system" and not begun and all(one.role == "system" for one in placed):
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
    """Returns the first message with the second's text appended."""
    return replace(first, content=f"{first.content}\n\n{second.content}")
