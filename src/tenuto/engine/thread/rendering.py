"""Rendering of a turn's input to tokens that continue a session's history; for any thread, since it needs no engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from tenuto.base.checks import shown
from tenuto.base.errors import IllegalTransition, InvalidRequest
from tenuto.base.tools.definitions import NO_TOOLS, Tools
from tenuto.base.tools.variables import NO_VARIABLES, Variables
from tenuto.base.turns import Message
from tenuto.base.wire.document import Conversation
from tenuto.session.records import TurnRecord
from tenuto.session.session import Session
from tenuto.text.chat import ChatTemplate, Rendered
from tenuto.text.constraint import Constraint
from tenuto.text.prompt import Prompt
from tenuto.text.room import Room
from tenuto.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Basis:
    """The properties of a session that determine how its next input is rendered: an equal basis gives the same tokens.
    `history` and `limit`, in tokens, only bound the input that has to be encoded."""

    session: str = field(compare=False)
    history: int = field(compare=False)
    limit: int = field(compare=False)
    system: str | None = None
    """The system message with which the conversation opens."""
    last_token: int | None = None
    """The last token of the history; `None` if the history is empty."""
    conversation: Conversation | None = None
    """The conversation after the last turn; `None` if that turn was given as tokens and not as messages."""
    cut: bool = False
    """Whether the history ends inside the last turn's input."""

    @classmethod
    def of(cls, session: Session) -> Self:
        """Returns the basis for the next input of `session`."""
        return cls(
            session=session.id,
            history=len(session.history),
            limit=session.limit,
            system=session.system,
            last_token=session.history[-1] if session.history else None,
            conversation=session.conversation,
            cut=session.cut,
        )

    @classmethod
    def opening(cls, context_length: int) -> Self:
        """Returns the basis for the first input of a session without a system message."""
        return cls(session="", history=0, limit=context_length)

    @property
    def empty(self) -> bool:
        """Whether the history is empty."""
        return self.last_token is None

    def room(self, *, generate: bool, spare: int = 0) -> Room:
        """Returns the room for the input of a turn; `generate`: the turn also generates."""
        return Room(self.history, self.limit - generate, self.limit, spare)


class Outdated(Exception):
    """Raised if the session's basis has changed since its input was prepared, which has to be prepared again."""


class Prepared(NamedTuple):
    """The input of a turn as tokens. `conversation`: the conversation after the turn; see `Basis`. `constraint`: that
    of its grammar and bad words. `prediction`: tokens that its output may repeat."""

    basis: Basis
    tokens: array[int]
    conversation: Conversation | None
    constraint: Constraint | None = None
    prediction: array[int] = array("i")


class Renderer:
    """Renders input with a model's template and tokenizer, if it has them."""

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer | None) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def prepare(
        self,
        basis: Basis,
        prompt: Prompt,
        *,
        generate: bool,
        tools: Tools = NO_TOOLS,
        variables: Variables = NO_VARIABLES,
        closed: bool = False,
    ) -> Prepared:
        """Returns the tokens that append `prompt`. `closed`: as in `ChatTemplate.opening`. Raises `InvalidRequest`,
        `IllegalTransition` if messages cannot follow the history, and `ContextExceeded` if the prompt certainly does
        not fit."""
        prepared = self._prepare(basis, prompt, generate, tools, variables, closed)
        basis.room(generate=generate).require(len(prepared.tokens))
        return prepared

    def _prepare(
        self, basis: Basis, prompt: Prompt, generate: bool, tools: Tools, variables: Variables, closed: bool
    ) -> Prepared:
        if prompt.messages or (not prompt.tokens and not basis.empty and basis.conversation is not None):
            rendered = self._render(basis, list(prompt.messages), generate, tools, variables, closed)
            return Prepared(basis, array("i", rendered.tokens), rendered.conversation)
        if tools:
            raise InvalidRequest("tools were given without messages; allowed: with chat messages", param="tools")
        if basis.empty:
            return Prepared(basis, array("i", self._opening_tokens(basis, prompt)), None)
        return Prepared(basis, array("i", prompt.tokens), None)

    def _opening_tokens(self, basis: Basis, prompt: Prompt) -> Sequence[int]:
        if basis.system is not None and prompt.tokens:
            raise InvalidRequest("the session has a system message; its first turn must consist of chat messages")
        tokenizer = self._tokenizer
        if prompt.text and tokenizer is not None and tokenizer.adds_bos and tokenizer.bos_id is not None:
            return [tokenizer.bos_id, *prompt.tokens]
        return prompt.tokens

    def _render(
        self, basis: Basis, messages: list[Message], generate: bool, tools: Tools, variables: Variables, closed: bool
    ) -> Rendered:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; give text or token ids instead of messages")
        room = basis.room(generate=generate)
        if basis.last_token is None:
            if basis.system is not None and messages[0].role != "system":
                messages.insert(0, Message("system", basis.system))
            return self._template.opening(messages, generate, room, tools, variables, closed=closed)
        if basis.conversation is None:
            raise IllegalTransition(
                f"messages cannot follow in session {basis.session}: its last turn was raw text or tokens; allowed: "
                "rewind to a turn made of messages"
            )
        if basis.cut:
            raise IllegalTransition(
                f"messages cannot follow in session {basis.session}: its history was cut inside a turn's input; "
                "allowed: rewind to the end of a turn, or into its output"
            )
        if tools and tools.digest != basis.conversation.tools:
            had = "other tools" if basis.conversation.tools else "no tools"
            raise InvalidRequest(
                f"session {basis.session} was opened with {had}; allowed: the same tools, or none",
                param="tools",
            )
        return self._template.delta(
            basis.conversation,
            messages,
            last_token=basis.last_token,
            generate=generate,
            room=room,
            variables=variables,
        )

    def check_system(self, system: object, context_length: int) -> None:
        """Checks a system message. Raises `InvalidRequest`, and `ContextExceeded` if it does not fit the context."""
        if system is None:
            return
        if not isinstance(system, str):
            raise InvalidRequest(f"system is {shown(system)}; allowed: text or none")
        if self._template is None:
            raise InvalidRequest("a system message needs a model with a chat template")
        if self._tokenizer is not None:
            room = Basis.opening(context_length).room(generate=True)
            room.require(self._tokenizer.least_tokens(system.strip()))

    def stop_ids(self, conversation: Conversation | None) -> tuple[int, ...]:
        """Returns the tokens that end an answer; none without a conversation."""
        return tuple(self._template.stop_ids) if self._template is not None and conversation is not None else ()

    def moved_inputs(self, origin: Session, records: Sequence[TurnRecord], target: Session) -> list[array[int]]:
        """Returns the inputs of turns of `origin`, changed to follow the history of `target` and each other; neither
        history is empty."""
        moved: list[array[int]] = []
        end = target.history[-1:]
        for record in records:
            moved.append(self._moved_input(origin, record, end))
            end = (end + moved[-1] + origin.history[record.input_end : record.end])[-1:]
        return moved

    def _moved_input(self, origin: Session, record: TurnRecord, end: array[int]) -> array[int]:
        """Returns the input of a turn of `origin`, changed to follow tokens that end with `end`. It begins with the
        token that closes the previous message, unless that message already ends with it."""
        tokens = origin.history[record.start : record.input_end]
        template = self._template
        if template is not None and record.conversation is not None and template.end_of_turn is not None:
            was_ended = origin.history[record.start - 1] in template.stop_ids
            is_ended = any(token in template.stop_ids for token in end)
            if was_ended and not is_ended:
                tokens.insert(0, template.end_of_turn)
            elif is_ended and not was_ended and tokens[:1] == array("i", [template.end_of_turn]):
                del tokens[0]
        return tokens
