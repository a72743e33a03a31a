"""Renders messages to tokens: the whole first turn, then only what each later turn adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from tenuto.base.errors import InvalidRequest, ModelError, TenutoError
from tenuto.base.tools.definitions import NO_TOOLS, Thinks, Tools
from tenuto.base.tools.variables import NO_VARIABLES, Variables
from tenuto.base.turns import Message
from tenuto.base.wire.document import Conversation
from tenuto.text.guard import Guard, Markup
from tenuto.text.room import Room
from tenuto.text.template import Template
from tenuto.text.tokenizer import Tokenizer
from tenuto.text.tools import for_template, habits_of, protected, texts_of, thinks_of, without_tools

SWITCHES = ("enable_thinking", "thinking")
"""Names of the template variable that turns thinking on and off."""


class _Displaced(InvalidRequest):
    """The template drops a message or writes it before earlier ones."""


class Rendered(NamedTuple):
    """Tokens to append to a history, and the conversation after them."""

    tokens: list[int]
    conversation: Conversation


class ChatTemplate:
    """A model's chat template, rendered turn by turn.

    A session's history is never rendered again. New messages are rendered after a short stand-in for the conversation
    so far. The text after the stand-in's last content is the delta, which begins with the markup that closes that
    message. If the template writes every turn as it did when the turn was the last, the tokens of all turns equal those
    of rendering the whole conversation at once.

    Other templates rewrite earlier turns. Here the history stays as it was read and generated: earlier reasoning is
    kept, system message, tools and date stay those of the turn they came with, and an answer keeps the token that ended
    it. `rewrites` lists the differences. Messages that a template drops or moves are refused.

    Control tokens in a message's content are plain text; only the template's own are control tokens.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        local_time: Callable[[], datetime] = datetime.now,
        tool_source: str | None = None,
    ) -> None:
        """`tool_source`: a separate template for conversations with tools. Renders examples with both, and raises
        `ModelError` if one is not a template or cannot be rendered turn by turn."""
        eos_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        variables = {"bos_token": tokenizer.control_text(tokenizer.bos_id), "eos_token": tokenizer.control_text(eos_id)}
        self._source = source
        self._template = Template(source, variables, local_time)
        self._needs_calls = False
        self._markup = Markup(tokenizer)
        asked = Conversation(system=False, dialogue=True, role="user")
        answered = Conversation(system=False, dialogue=True, role="assistant")
        question = [Message("user", "x")]
        closer, prompt = self._try(asked, answered, question)
        self._system_refusal: str | None = None
        self._system_stays = True
        try:
            self._tail(Conversation(system=True, dialogue=True, role="assistant"), question, generate=True)
        except _Displaced:
            self._system_stays = False
        except TenutoError as error:
            self._system_refusal = str(error)
        self._writes_results = self._template.knows_tools or self._can_write(answered, Message("tool", "x"))
        self._needs_calls = self._writes_results and self._writes_results_of_calls_only(answered)
        habits = habits_of(source, prompt, tokenizer.control_ids.get)
        self.habits = replace(
            habits,
            switches=tuple(self._switches(asked, prompt)),
            after_result=self._thinks_after_result(habits.thinks),
            late_system=self._can_write(answered, Message("system", "x"), Message("user", "x")),
        )
        """The forms in which the model writes calls and thoughts."""
        self._leading, first = self._closing(closer)
        self.end_of_turn = first
        """The control token with which the template closes an assistant message, if it uses one."""
        self.stop_ids = frozenset({*tokenizer.eos_ids, *([first] if first is not None else [])})
        """The tokens that end an answer."""
        _, followed = self._closing(self._tail(answered, question, generate=True)[0])
        self._closers = frozenset({first, followed}) if followed is not None and first != followed else frozenset()
        self.rewrites = self._rewrites()
        """Descriptions of what the template would rewrite in earlier turns; sessions leave these unchanged."""
        self._with_tools: ChatTemplate | None = None
        if tool_source is not None and tool_source != source:
            self._with_tools = ChatTemplate(tool_source, tokenizer, local_time)
            own = self.habits
            self.habits = replace(
                self._with_tools.habits, thinks=own.thinks, switches=own.switches, late_system=own.late_system
            )
            self.stop_ids |= self._with_tools.stop_ids
            self.rewrites = tuple(dict.fromkeys((*self.rewrites, *self._with_tools.rewrites)))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """Returns the chat template of a model, or None. Raises `ModelError`."""
        if tokenizer.chat_template is None:
            return None
        return cls(tokenizer.chat_template, tokenizer, tool_source=tokenizer.tool_template)

    def _try(self, asked: Conversation, answered: Conversation, question: Sequence[Message]) -> tuple[str, str]:
        """Returns the text that closes an answer and the text that asks for one. If the template fails without a list
        of tools, it gets an empty one from now on, which some templates need. Raises `ModelError`."""
        try:
            closer = self._tail(answered, [], generate=False)[0]
            self._tail(answered, question, generate=True)
            return closer, self._tail(asked, [], generate=True)[0]
        except TenutoError as error:
            if self._template.no_tools is None:
                self._template.no_tools = []
                return self._try(asked, answered, question)
            raise ModelError(f"the chat template cannot be rendered turn by turn: {error}") from None

    def _closing(self, text: str) -> tuple[str, int | None]:
        """Returns the blanks at the start of `text`, which follows a message's content, and the control token after
        them; "" and None if `text` does not begin so."""
        first, *rest = [*self._markup.tokenizer.split_markup(text), None][:2]
        if isinstance(first, str) and not first.strip() and rest and isinstance(rest[0], int):
            return first, rest[0]
        return "", first if isinstance(first, int) else None

    def _can_write(self, earlier: Conversation, *messages: Message) -> bool:
        """Whether the template writes `messages` after the conversation `earlier`."""
        try:
            self._tail(earlier, messages, generate=True)
        except TenutoError:
            return False
        return True

    def _writes_results_of_calls_only(self, answered: Conversation) -> bool:
        """Whether the template accepts a tool's result after a call, but not after an answer without calls."""
        result = Message("tool", "x", name="f", tool_call_id="0" * 9)
        if self._can_write(answered, result):
            return False
        self._needs_calls = True
        return self._can_write(answered, result)

    def _thinks_after_result(self, usual: Thinks) -> Thinks | None:
        """Returns how an answer to a tool's result begins, if it differs from `usual`."""
        if not self._writes_results:
            return None
        with suppress(TenutoError):
            prompt, _ = self._tail(Conversation(system=False, dialogue=True, role="tool"), [], generate=True)
            thinks = thinks_of(self._source, prompt)
            return thinks if thinks != usual else None
        return None

    def _switches(self, asked: Conversation, prompt: str) -> Iterator[tuple[str, bool, Thinks]]:
        """Yields each variable, its value and the resulting `Thinks`, where these change how an answer begins.
        `prompt`: the text that asks for an answer without these variables."""
        usual = thinks_of(self._source, prompt)
        for name in (name for name in SWITCHES if name in self._source):
            for value in (False, True):
                with suppress(TenutoError):
                    variables = Variables.of({name: value})
                    text, _ = self._tail(asked, [], generate=True, variables=variables)
                    if (thinks := thinks_of(self._source, text)) != usual:
                        yield name, value, thinks

    def _rewrites(self) -> tuple[str, ...]:
        found = []
        if self.habits.thinks != "no":
            said = {"role": "assistant", "content": "<think>\nq1x\n</think>\n\ny"}
            asked = {"role": "user", "content": "z"}
            with suppress(TenutoError):
                if "q1x" not in self._template.render([asked, said, asked], generate=True):
                    found.append("removes the reasoning of earlier answers")
        if not self._system_stays:
            found.append("moves the system message to the last turn")
        if self._closers:
            found.append("closes the last answer with another token than earlier ones")
        return tuple(found)

    def opening(
        self,
        messages: Sequence[Message],
        generate: bool = True,
        room: Room | None = None,
        tools: Tools = NO_TOOLS,
        variables: Variables = NO_VARIABLES,
        *,
        closed: bool = False,
    ) -> Rendered:
        """Renders a session's first turn, with the definitions of `tools`. With `generate` the tokens end where the
        assistant begins to speak, otherwise with the last content, or, if `closed`, with all that the template writes
        after it. Raises `InvalidRequest` if there are no messages or the template refuses them. Raises
        `ContextExceeded`, without encoding, if they certainly do not fit into `room`."""
        if not messages:
            raise InvalidRequest("a conversation opens with no messages; allowed: at least one")
        if tools and self._with_tools is not None:
            return self._with_tools.opening(messages, generate, room, tools, variables, closed=closed)
        self._require_room(messages, room)
        digest = tools.digest
        system = messages[0].role == "system"
        if system and self._system_refusal is not None:
            raise InvalidRequest(self._system_refusal)
        if not self._template.knows_tools:
            told_in = self._system_refusal is None
            messages = without_tools(messages, tools, system=told_in, results=self._writes_results)
            tools = NO_TOOLS
            system = messages[0].role == "system"
        system = system and self._system_stays
        later = Conversation(system=system, dialogue=False, role="system", tools=digest).then(messages, generate)
        guard = self._guard(messages, tools, variables)
        told = protected(tools.parsed(), guard.protect)
        text = self._template.render(_protected(messages, guard), generate, told, _guarded(variables, guard))
        if not (generate or closed):
            text = self._unclosed(text, later, variables)
        return Rendered(guard.encode(text, room), later)

    def delta(
        self,
        earlier: Conversation,
        messages: Sequence[Message],
        *,
        last_token: int,
        generate: bool = True,
        room: Room | None = None,
        variables: Variables = NO_VARIABLES,
    ) -> Rendered:
        """Renders `messages` as a continuation of `earlier`, whose history ends with `last_token`. The tokens begin
        with the markup that closes the last message, without an end-of-turn token already in the history. `variables`
        apply to this turn only.

        Without messages, no tokens are added if the last answer is unfinished, so that the model continues it;
        otherwise the assistant's turn begins. Raises `InvalidRequest` if the template refuses the messages here, and
        `ContextExceeded` like `opening`."""
        if earlier.tools and self._with_tools is not None:
            return self._with_tools.delta(
                earlier, messages, last_token=last_token, generate=generate, room=room, variables=variables
            )
        self._require_room(messages, room)
        answering = earlier.role == "assistant"
        ended = answering and last_token in self.stop_ids
        if not messages and (not generate or (answering and not ended)):
            return Rendered([], earlier)
        if not self._template.knows_tools:
            messages = without_tools(messages, NO_TOOLS, system=True, results=self._writes_results)
        later = earlier.then(messages, generate)
        text, guard = self._tail(earlier, messages, generate=generate, variables=variables)
        before = self._markup.tokenizer.before(last_token)
        leading = self._markup.tokenizer.encode(self._leading, before=before) if ended else []
        if room is not None:
            room = room._replace(spare=(len(leading) + 1) * ended)
        tokens = guard.encode(text if generate else self._unclosed(text, later, variables), room, before)
        closes = tokens[len(leading) : len(leading) + 1] if tokens[: len(leading)] == leading else []
        if ended and closes and (closes == [last_token] or self._closers == {closes[0], last_token}):
            del tokens[: len(leading) + 1]  # the model wrote the closing token, perhaps without the blanks before it
        return Rendered(tokens, later)

    def _require_room(self, messages: Sequence[Message], room: Room | None) -> None:
        """Raises `ContextExceeded` if the texts of users and tools, which templates keep except for the blanks around
        them, certainly do not fit into `room`. It is called before rendering: templates copy texts several times, while
        no other thread runs Python."""
        if room is None:
            return
        texts = (message.content.strip() for message in messages if message.role in ("user", "tool"))
        least = (self._markup.tokenizer.least_tokens(text) for text in texts)
        room.require(sum(max(0, tokens - 1) for tokens in least))  # a token may reach from one text into the next

    def _guard(
        self, messages: Sequence[Message], tools: Tools = NO_TOOLS, variables: Variables = NO_VARIABLES
    ) -> Guard:
        return Guard(self._markup, [self._source, variables.source, *texts_of(messages, tools)])

    def _tail(
        self, earlier: Conversation, messages: Sequence[Message], *, generate: bool, variables: Variables = NO_VARIABLES
    ) -> tuple[str, Guard]:
        """Returns the text that the template writes after the content of `earlier`'s last message, and the guard that
        protected `messages` in it."""
        guard = self._guard(messages, variables=variables)
        told = _guarded(variables, guard)
        results = bool(messages) and messages[0].role == "tool" and earlier.role == "assistant" and self._needs_calls
        stand_in = self._call_before(earlier, messages[0], guard) if results else None
        stand_in = stand_in or _stand_in(earlier, guard.mark, guard.filler)
        text = self._template.render(stand_in + _protected(messages, guard), generate, variables=told)
        before, mark, tail = text.partition(guard.mark)
        if not mark or guard.mark in tail or guard.filler in tail:
            raise _Displaced(f"the model's chat template moves or drops messages before a later {earlier.role} one")
        if self._markup.half_written(before, tail):
            raise InvalidRequest("the model's chat template leaves a control token half written beside a message")
        self._check_places(stand_in, messages, guard, told)
        if results:  # drop the rest of the call's arguments, up to the first control token
            first = next(self._markup.tokenizer.split_markup(tail), None)
            tail = tail.removeprefix(first) if isinstance(first, str) else tail
        return tail, guard

    def _call_before(self, earlier: Conversation, result: Message, guard: Guard) -> list[dict[str, Any]]:
        """Returns messages like `_stand_in`, but the last is a call, of the function that `result` answers,
        with `guard.mark` as its argument. Raises `InvalidRequest` if `result` does not name the function."""
        if not result.name:
            raise InvalidRequest(
                "the model's chat template needs the function's name to write a result after an answer; allowed: a "
                "message with name, or the whole conversation"
            )
        function = {"name": guard.protect(result.name), "arguments": {"x": guard.mark}}
        call = {"type": "function", "id": guard.protect(result.tool_call_id), "function": function}
        *before, answer = _stand_in(earlier, "", guard.filler)
        return [*before, {**answer, "tool_calls": [call]}]

    def _check_places(
        self, stand_in: list[dict[str, Any]], messages: Sequence[Message], guard: Guard, variables: dict[str, Any]
    ) -> None:
        """Raises `_Displaced` unless the template writes each of `messages`, except the assistant's, after the
        stand-in; text written elsewhere would never reach the history."""
        probed = [
            {**raw, "content": guard.probe} if raw["role"] != "assistant" else raw
            for raw in _protected(messages, guard)
        ]
        expected = sum(raw["role"] != "assistant" for raw in probed)
        if not expected:
            return
        _, _, tail = self._template.render([*stand_in, *probed], generate=True, variables=variables).partition(
            guard.mark
        )
        if tail.count(guard.probe) < expected:
            roles = sorted({raw["role"] for raw in probed} - {"assistant"})
            raise _Displaced(
                f"the model's chat template moves or drops messages ({' or '.join(roles)}) that follow others; "
                "allowed in a session: messages that it writes in order"
            )

    def _unclosed(self, text: str, conversation: Conversation, variables: Variables) -> str:
        """Returns `text` up to the end of its last message's content. Raises `InvalidRequest` if that end is
        unknown."""
        closer, _ = self._tail(conversation, [], generate=False, variables=variables)
        if not text.endswith(closer):
            raise InvalidRequest(f"the model's chat template cannot append a {conversation.role} message by itself")
        return text.removesuffix(closer)


def _stand_in(earlier: Conversation, last: str, filler: str) -> list[dict[str, Any]]:
    """Returns the messages of the shortest conversation that a template continues like `earlier`. The content is `last`
    in the last message and `filler` in the others."""
    if not earlier.dialogue:
        return [{"role": "system", "content": last}]
    roles = ["system"] if earlier.system else []
    if earlier.role != "user":
        roles.append("user")
    if earlier.role in ("system", "tool"):
        roles.append("assistant")
    final = {"role": earlier.role, "content": last}
    if earlier.role == "tool":
        final["tool_call_id"] = "0" * 9  # some templates refuse results without a nine-character id
    return [*({"role": role, "content": filler} for role in roles), final]


def _guarded(variables: Variables, guard: Guard) -> dict[str, Any]:
    return {name: protected(value, guard.protect) for name, value in variables.parsed().items()}


def _protected(messages: Sequence[Message], guard: Guard) -> list[dict[str, Any]]:
    return [for_template(message, guard.protect) for message in messages]
