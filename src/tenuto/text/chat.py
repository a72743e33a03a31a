"""Messages to tokens: all of the first turn, then only what each later turn adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from tenuto.base.errors import InvalidRequest, ModelError, TenutoError
from tenuto.base.tools import NO_TOOLS, Tools
from tenuto.base.turns import Message
from tenuto.text.guard import Guard, Markup
from tenuto.text.room import Room
from tenuto.text.template import Template
from tenuto.text.tokenizer import Tokenizer
from tenuto.text.tools import for_template, habits_of, protected, texts_of, without_tools


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that rendering needs to know of the messages already in a history. Its size does not grow with them.

    The history ends with the last message's content. What closes that message is not in it yet, except for the
    end-of-turn token if the model wrote it.
    """

    system: bool
    """Whether it opened with a system message."""
    dialogue: bool
    """Whether it has messages other than system messages."""
    role: str
    """Who spoke last, or speaks now."""
    tools: str = ""
    """A digest of the tools that it opened with."""

    def then(self, messages: Sequence[Message], generate: bool) -> Conversation:
        """The conversation with `messages` appended, and with `generate` also the assistant's answer."""
        roles = [message.role for message in messages] + ["assistant"] * generate
        return replace(self, dialogue=self.dialogue or set(roles) != {"system"}, role=roles[-1])

    def stand_in(self, last: str, filler: str) -> list[dict[str, Any]]:
        """The shortest conversation that a template continues in the same way. The last message's content is `last`,
        the others' `filler`."""
        if not self.dialogue:
            return [{"role": "system", "content": last}]
        roles = ["system"] if self.system else []
        if self.role != "user":
            roles.append("user")
        if self.role in ("system", "tool"):
            roles.append("assistant")
        return [*({"role": role, "content": filler} for role in roles), {"role": self.role, "content": last}]


class Rendered(NamedTuple):
    """Tokens to append to a history, and the conversation after them."""

    tokens: list[int]
    conversation: Conversation


class ChatTemplate:
    """A model's chat template, rendered turn by turn.

    A session's history is never rendered again. New messages are rendered after a short stand-in for the conversation
    so far, and what the template writes after the stand-in's last content is the delta: it begins with whatever closes
    that message. So the tokens of all turns are those of rendering the whole conversation at once, provided that the
    template writes before an assistant message what it writes to ask for one. With templates that do not, such as those
    that remove earlier reasoning, the history stays as it was generated.

    Control tokens in a message's content are plain text; only the template's own are control tokens.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, local_time: Callable[[], datetime] = datetime.now) -> None:
        """Raises `ModelError` if `source` is not a template or, as trying it shows, cannot be rendered as a delta."""
        eos_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        variables = {
            "bos_token": tokenizer.control_text(tokenizer.bos_id),
            "eos_token": tokenizer.control_text(eos_id),
        }
        self._source = source
        self._template = Template(source, variables, local_time)
        self._markup = Markup(tokenizer)
        asked = Conversation(system=False, dialogue=True, role="user")
        answered = replace(asked, role="assistant")
        question = [Message("user", "x")]
        try:
            closer = self._tail(answered, [], generate=False)[0]
            self._tail(answered, question, generate=True)
            prompt = self._tail(asked, [], generate=True)[0]
        except TenutoError as error:
            raise ModelError(f"the chat template cannot be rendered turn by turn: {error}") from None
        self._system_refusal: str | None = None
        try:
            self._tail(replace(answered, system=True), question, generate=True)
        except TenutoError as error:
            self._system_refusal = str(error)
        self.habits = habits_of(source, prompt, tokenizer.control_id)
        """How its model writes calls and thoughts."""
        first = next(tokenizer.split_markup(closer), None)
        self.end_of_turn = first if isinstance(first, int) else None
        """The token that closes an assistant message, if the template closes it with a control token."""
        self.stop_ids = frozenset({*tokenizer.eos_ids, *([first] if isinstance(first, int) else [])})
        """The tokens that end an answer."""

    def opening(
        self,
        messages: Sequence[Message],
        generate: bool = True,
        room: Room | None = None,
        tools: Tools = NO_TOOLS,
    ) -> Rendered:
        """The tokens of a session's first turn, complete as they are, which tell of `tools`. With `generate` they end
        where the assistant begins to speak, otherwise with the last content. Raises `InvalidRequest` if there are no
        messages or the template does not allow them, and `ContextExceeded` if they certainly do not fit into `room`;
        they are rendered by then, but not encoded."""
        if not messages:
            raise InvalidRequest("a conversation opens with no messages; allowed: at least one")
        digest = tools.digest
        system = messages[0].role == "system"
        if system and self._system_refusal is not None:
            raise InvalidRequest(self._system_refusal)
        if not self._template.knows_tools:
            messages, tools = without_tools(messages, tools, system=self._system_refusal is None), NO_TOOLS
            system = messages[0].role == "system"
        later = Conversation(system=system, dialogue=False, role="system", tools=digest).then(messages, generate)
        guard = self._guard(messages, tools)
        told = protected(tools.parsed(), guard.protect)
        text = self._template.render(_protected(messages, guard), generate, told)
        return Rendered(guard.encode(text if generate else self._unclosed(text, later), room), later)

    def delta(
        self,
        earlier: Conversation,
        messages: Sequence[Message],
        *,
        last_token: int,
        generate: bool = True,
        room: Room | None = None,
    ) -> Rendered:
        """The tokens that append `messages` to the history of `earlier`, which ends with `last_token`. They begin with
        what closes the last message, except for an end-of-turn token that is already there.

        Without messages, an unfinished answer is continued, which takes no tokens; after a finished one, or another
        role's message, the assistant is asked to speak. Raises `InvalidRequest` if the template does not allow these
        messages here, and `ContextExceeded` as `opening` does."""
        answering = earlier.role == "assistant"
        ended = answering and last_token in self.stop_ids
        if not messages and (not generate or (answering and not ended)):
            return Rendered([], earlier)
        if not self._template.knows_tools:
            messages = without_tools(messages, NO_TOOLS, system=True)
        later = earlier.then(messages, generate)
        text, guard = self._tail(earlier, messages, generate=generate)
        if room is not None:
            room = room._replace(spare=int(ended))
        before = self._markup.tokenizer.before(last_token)
        tokens = guard.encode(text if generate else self._unclosed(text, later), room, before)
        if ended and tokens[:1] == [last_token]:
            del tokens[0]
        return Rendered(tokens, later)

    def _guard(self, messages: Sequence[Message], tools: Tools = NO_TOOLS) -> Guard:
        return Guard(self._markup, [self._source, *texts_of(messages, tools)])

    def _tail(self, earlier: Conversation, messages: Sequence[Message], *, generate: bool) -> tuple[str, Guard]:
        """What the template writes after the content of `earlier`'s last message."""
        guard = self._guard(messages)
        stand_in = earlier.stand_in(guard.mark, guard.filler)
        text = self._template.render(stand_in + _protected(messages, guard), generate)
        before, mark, tail = text.partition(guard.mark)
        if not mark or guard.mark in tail or guard.filler in tail:
            raise InvalidRequest(f"the model's chat template moves or drops messages before a later {earlier.role} one")
        if self._markup.half_written(before, tail):
            raise InvalidRequest("the model's chat template leaves a control token half written beside a message")
        return tail, guard

    def _unclosed(self, text: str, conversation: Conversation) -> str:
        """`text` up to the end of its last message's content."""
        closer, _ = self._tail(conversation, [], generate=False)
        if not text.endswith(closer):
            raise InvalidRequest(f"the model's chat template cannot append a {conversation.role} message by itself")
        return text.removesuffix(closer)


def _protected(messages: Sequence[Message], guard: Guard) -> list[dict[str, Any]]:
    return [for_template(message, guard.protect) for message in messages]
