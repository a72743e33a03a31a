"""A turn's input to tokens, against what its session has. Any thread may do this; it takes no engine."""

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
from tenuto.session.records import TurnRecord
from tenuto.session.session import Session
from tenuto.text.chat import ChatTemplate, Conversation, Rendered
from tenuto.text.constraint import Constraint
from tenuto.text.prompt import Prompt
from tenuto.text.room import Room
from tenuto.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Basis:
    """All that the rendering of a session's next input depends on: against equal ones it comes to the same tokens.
    `history` and `limit`, in tokens, only say what need not be encoded."""

    session: str = field(compare=False)
    history: int = field(compare=False)
    limit: int = field(compare=False)
    system: str | None = None
    """Opens the conversation."""
    last_token: int | None = None
    """Of the history; `None` if that is empty."""
    conversation: Conversation | None = None
    """What the last turn made of it; `None` if that was not made of messages."""
    cut: bool = False
    """The history ends inside the last turn's input."""

    @classmethod
    def of(cls, session: Session) -> Self:
        """What the next input of `session` is rendered against."""
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
        """What the first input of a session without a system message is rendered against."""
        return cls(session="", history=0, limit=context_length)

    @property
    def empty(self) -> bool:
        """Whether there is no history."""
        return self.last_token is None

    def room(self, *, generate: bool, spare: int = 0) -> Room:
        """What is left for the input of a turn, or of a prefill-only one."""
        return Room(self.history, self.limit - generate, self.limit, spare)


class Outdated(Exception):
    """Input was prepared against a basis that is no longer the session's: it has to be prepared again."""


class Prepared(NamedTuple):
    """Input as a turn takes it. `conversation`: what the turn makes of it; see `Basis`. `constraint`: its grammar,
    compiled."""

    basis: Basis
    tokens: array[int]
    conversation: Conversation | None
    constraint: Constraint | None = None


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
    ) -> Prepared:
        """The tokens that append `prompt`. Raises `InvalidRequest`, `IllegalTransition` if the history is not one that
        messages can follow, and `ContextExceeded` if it is clear that too little room is left."""
        prepared = self._prepare(basis, prompt, generate, tools, variables)
        basis.room(generate=generate).require(len(prepared.tokens))
        return prepared

    def _prepare(self, basis: Basis, prompt: Prompt, generate: bool, tools: Tools, variables: Variables) -> Prepared:
        if prompt.messages or (not prompt.tokens and not basis.empty and basis.conversation is not None):
            rendered = self._render(basis, list(prompt.messages), generate, tools, variables)
            return Prepared(basis, array("i", rendered.tokens), rendered.conversation)
        if tools:
            raise InvalidRequest("tools without messages; allowed: with chat messages", param="tools")
        if basis.empty:
            return Prepared(basis, array("i", self._opening_tokens(basis, prompt)), None)
        return Prepared(basis, array("i", prompt.tokens), None)

    def _opening_tokens(self, basis: Basis, prompt: Prompt) -> Sequence[int]:
        if basis.system is not None and prompt.tokens:
            raise InvalidRequest("the session has a system message; its first turn must be one of chat messages")
        tokenizer = self._tokenizer
        if prompt.text and tokenizer is not None and tokenizer.adds_bos and tokenizer.bos_id is not None:
            return [tokenizer.bos_id, *prompt.tokens]
        return prompt.tokens

    def _render(
        self, basis: Basis, messages: list[Message], generate: bool, tools: Tools, variables: Variables
    ) -> Rendered:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; give text or token ids instead of messages")
        room = basis.room(generate=generate)
        if basis.last_token is None:
            if basis.system is not None and messages[0].role != "system":
                messages.insert(0, Message("system", basis.system))
            return self._template.opening(messages, generate, room, tools, variables)
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
            had = "others" if basis.conversation.tools else "none"
            raise InvalidRequest(
                f"session {basis.session} has opened with {had}, not these tools; allowed: the same, or none",
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
        """Whether a session may have this system message. Raises `InvalidRequest`, and `ContextExceeded` if it alone
        does not fit into a context."""
        if system is None:
            return
        if not isinstance(system, str):
            raise InvalidRequest(f"system is {shown(system)}; allowed: text, or none")
        if self._template is None:
            raise InvalidRequest("a system message needs a model with a chat template")
        if self._tokenizer is not None:
            room = Basis.opening(context_length).room(generate=True)
            room.require(self._tokenizer.least_tokens(system.strip()))

    def stop_ids(self, conversation: Conversation | None) -> tuple[int, ...]:
        """The tokens that end an answer, if this is a conversation."""
        return tuple(self._template.stop_ids) if self._template is not None and conversation is not None else ()

    def moved_input(self, origin: Session, record: TurnRecord, target: Session) -> array[int]:
        """The input of a turn of `origin` as it reads after the history of `target`, neither of them empty. It begins
        with what closes the message before it: nothing, where that ended by itself."""
        tokens = origin.history[record.start : record.input_end]
        template = self._template
        if template is not None and record.conversation is not None and template.end_of_turn is not None:
            was_ended = origin.history[record.start - 1] in template.stop_ids
            is_ended = target.history[-1] in template.stop_ids
            if was_ended and not is_ended:
                tokens.insert(0, template.end_of_turn)
            elif is_ended and not was_ended and tokens[:1] == array("i", [template.end_of_turn]):
                del tokens[0]
        return tokens


def check_pick(session: Session, numbers: Sequence[int]) -> None:
    """Whether a conversation may consist of the turns of `session` with these numbers. Raises `InvalidRequest`."""
    if numbers[:1] != [1] and numbers and session.records[0].conversation is not None:
        raise InvalidRequest(f"turn {numbers[0]} cannot open a conversation; allowed: turns that begin with turn 1")
