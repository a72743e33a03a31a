"""What the messages in a history amount to, so that the next ones can be rendered as a delta."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tenuto.base.checks import shown
from tenuto.base.errors import InvalidRequest
from tenuto.engine.rendering import Basis
from tenuto.session.session import Session
from tenuto.text.chat import ChatTemplate, Conversation


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a turn made of the conversation (`None`: tokens that are no messages) once all its input is there."""

    input_end: int
    conversation: Conversation | None


class MovedTurn(NamedTuple):
    """A turn's tokens at another place, and what it makes of the conversation there."""

    input: array[int]
    output: array[int]
    conversation: Conversation | None


class ChatLog:
    """The conversation at every turn boundary of one session.

    It follows the history without being told of commits and aborts: what a turn would make of the conversation is noted
    where the turn starts, and counts if a committed turn starts there. A turn that aborts leaves a note that no record
    refers to, until the next turn at that place overwrites it. `regenerate` keeps a turn's start, and so its note.
    """

    def __init__(self, template: ChatTemplate | None, system: str | None) -> None:
        """`system` opens the conversation. Raises `InvalidRequest` if there is no template for it."""
        if system is not None and not isinstance(system, str):
            raise InvalidRequest(f"system is {shown(system)}; allowed: text, or none")
        if system is not None and template is None:
            raise InvalidRequest("a system message needs a model with a chat template")
        self._template = template
        self.system = system
        self._turns: dict[int, _Turn] = {}  # by the turn's first position

    def basis(self, session: Session) -> Basis:
        """What the session's next input is rendered against."""
        turn = self._turns.get(session.records[-1].start) if session.records else None
        return Basis(
            session=session.id,
            history=len(session.history),
            limit=session.limit,
            system=self.system,
            last_token=session.history[-1] if session.history else None,
            conversation=turn.conversation if turn is not None else None,
            cut=turn is not None and len(session.history) < turn.input_end,
        )

    def note(self, start: int, length: int, conversation: Conversation | None) -> None:
        """A turn with `length` input tokens starts at `start`; committed, it makes the conversation this."""
        self._turns[start] = _Turn(start + length, conversation)

    def fork(self, position: int) -> ChatLog:
        """The log of a session with the first `position` tokens of this one."""
        child = ChatLog(self._template, self.system)
        child._turns = {start: turn for start, turn in self._turns.items() if start < position}
        return child

    def forget(self, position: int) -> None:
        """The history now ends at `position`."""
        self._turns = {start: turn for start, turn in self._turns.items() if start < position}

    def moved(self, source: ChatLog, origin: Session, number: int, target: Session) -> MovedTurn:
        """Turn `number` of `origin`, whose log is `source`, as it reads after the history of `target`, whose log this
        is. Its input begins with what closes the message before it: nothing, where that ended by itself."""
        record = origin.records[number - 1]
        tokens, output = origin.history[record.start : record.input_end], origin.history[record.input_end : record.end]
        note = source._turns.get(record.start)
        conversation = note.conversation if note is not None else None
        template = self._template
        if template is not None and conversation is not None and template.end_of_turn is not None:
            was_ended = origin.history[record.start - 1] in template.stop_ids
            is_ended = target.history[-1] in template.stop_ids
            if was_ended and not is_ended:
                tokens.insert(0, template.end_of_turn)
            elif is_ended and not was_ended and tokens[:1] == array("i", [template.end_of_turn]):
                del tokens[0]
        return MovedTurn(tokens, output, conversation)

    def check_pick(self, numbers: Sequence[int]) -> None:
        """Whether a conversation may consist of these turns alone. Raises `InvalidRequest`."""
        opening = self._turns.get(0)
        if numbers[:1] != [1] and numbers and opening is not None and opening.conversation is not None:
            raise InvalidRequest(f"turn {numbers[0]} cannot open a conversation; allowed: turns that begin with turn 1")

    def stop_ids(self, conversation: Conversation | None) -> tuple[int, ...]:
        """The tokens that end an answer, if this is a conversation."""
        return tuple(self._template.stop_ids) if self._template is not None and conversation is not None else ()

    def of_last_turn(self, session: Session) -> Conversation | None:
        """What the last turn made of the conversation; `None` if it was not made of messages."""
        turn = self._turns.get(session.records[-1].start) if session.records else None
        return turn.conversation if turn is not None else None
