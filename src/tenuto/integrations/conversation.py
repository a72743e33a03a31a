"""A spoken conversation as a session: frameworks give their whole list of messages with every request, and shorten an
answer to what was heard of it when the user interrupts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Unpack

from tenuto.base.errors import IllegalTransition, NotFound, SessionClosed, TenutoError
from tenuto.base.options import RemoteOptions
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.turns import Usage
from tenuto.client import AsyncRemoteEngine, AsyncRemoteSession, AsyncRemoteTurnStream
from tenuto.integrations.chats import native_message

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The text of tokens that are a part of a character."""


@dataclass(frozen=True, slots=True)
class Said:
    """A committed turn: the messages that it was `given`, and its answer. `raw`: the answer's whole text, `text`: that
    without calls and thoughts, as messages have it. `tokens`: those of the answer; `start`: the first one's position in
    the history. `cut`: whether a stop was cut from the text, which the history has."""

    given: list[dict[str, Any]]
    raw: str
    text: str
    calls: list[str]
    tokens: list[int]
    start: int
    cut: bool

    def heard(self, text: str, tokens: list[int]) -> Said:
        """Returns the turn with only the part of its answer that was heard."""
        return Said(self.given, _before(self.raw, self.text) + text, text, [], tokens, self.start, cut=False)


@dataclass(frozen=True, slots=True)
class Place:
    """Where messages continue a conversation: after its first `turns` turns, which are the first `used` messages.
    `heard`: the part of the last turn's answer that the messages have; `None` if they have all of it."""

    turns: int = 0
    used: int = 0
    heard: str | None = None


def place(said: Sequence[Said], messages: Sequence[dict[str, Any]]) -> Place:
    """Finds the last turn up to whose end the messages agree with the conversation. Answers are compared without
    blanks, which speech does not have. If an answer stops earlier than ours, that part of it agrees, and nothing after
    it does. A turn from which a stop was cut does not agree: the conversation has the stop."""
    found = Place()
    for number, turn in enumerate(said, 1):
        asked = found.used + len(turn.given)
        if list(messages[found.used : asked]) != turn.given:
            break
        used = asked
        while used < len(messages) and messages[used]["role"] == "assistant":
            used += 1
        answer = messages[asked:used]
        text = "".join(message["content"] for message in answer)
        calls = [call["id"] for message in answer for call in message.get("tool_calls", ())]
        ours, theirs = letters(turn.text), letters(text)
        if not answer or calls != turn.calls or not ours.startswith(theirs):
            break
        if ours != theirs:
            return Place(number, used, text) if not calls and turn.text in turn.raw else found
        if turn.cut:
            break
        found = Place(number, used)
    return found


def letters(text: str) -> str:
    """Returns `text` without blanks."""
    return "".join(text.split())


def _before(raw: str, text: str) -> str:
    """Returns the part of an answer before its text, such as thoughts."""
    return raw.partition(text)[0] if text else raw


class Conversation:
    """The session of one conversation. One answer is given at a time: the next one interrupts it.

    Invariant: while no turn is open, `_said` are the turns of the session if it has `_version`.
    """

    def __init__(self, engine: AsyncRemoteEngine, *, ttl: float | None = None) -> None:
        """`ttl`: seconds without a turn after which the server closes the session; a later answer opens another."""
        self.usage: Usage | None = None
        """The token counts of the last answer; `None` while it is given."""
        self._engine = engine
        self._ttl = ttl
        self._session: AsyncRemoteSession | None = None
        self._said: list[Said] = []
        self._version = 0
        self._tools: Sequence[Any] | None = None
        self._drafting = False
        self._answering: Answering | None = None
        self._lock = asyncio.Lock()

    @property
    def session_id(self) -> str | None:
        """The session's id on the server, once there is one."""
        return self._session.id if self._session is not None else None

    async def answer(
        self, messages: Sequence[dict[str, Any]], **options: Unpack[RemoteOptions]
    ) -> AsyncIterator[AnswerPart]:
        """Answers `messages`, which are in OpenAI's form. If the caller stops reading, the answer ends, and what was
        read of it stays until the next messages say what was heard."""
        async with self._lock:
            given = [native_message(message) for message in messages]
            session = await self._opened(options.get("tools"))
            at = place(self._said, given)
            await self._cut(session, at)
            self._drafting, self.usage = False, None
            answering = self._answering = Answering(given[at.used :], session.turn(given[at.used :], **options))
        try:
            async for part in answering.parts():
                yield part
        finally:
            answering.interrupt()
        self.usage = (await answering.stream.result()).usage

    async def draft(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None) -> bool:
        """Computes messages ahead of `answer`, to be called again whenever the last one grows. Returns whether it did:
        nothing is computed while an answer is given, before the messages say what was heard of the last one, or if
        `tools`, those that the answer will have, are yet to become part of the prompt."""
        async with self._lock:
            if self._answering is not None and not self._answering.ended:
                return False
            given = [native_message(message) for message in messages]
            session = await self._opened(tools)
            at = place(self._said, given)
            if at.turns < len(self._said) or (tools and not self._said):
                return False
            await self._cut(session, at)
            await session.draft(given[at.used :])
            self._drafting = True
            return True

    async def close(self) -> None:
        """Ends an open turn, and closes the session and the connection. Nothing is left on the server."""
        async with self._lock:
            await self._settle()
            if self._session is not None:
                with suppress(NotFound, SessionClosed):
                    await self._session.close()
            self._session = None
        await self._engine.close()

    async def _opened(self, tools: Sequence[Any] | None) -> AsyncRemoteSession:
        """Returns the session without an open turn. It has the turns that are known here, or none: if the server has
        closed it, something else has changed it, or the tools differ, which its first messages contain."""
        await self._settle()
        if self._session is not None:
            with suppress(NotFound, SessionClosed):
                if (await self._session.info()).version != self._version or tools != self._tools:
                    await self._rewind(self._session, turn=0)
                    self._said, self._tools = [], tools
                return self._session
        self._said, self._drafting, self._tools, self._version = [], False, tools, 0
        self._session = await self._engine.session(ttl=self._ttl)
        return self._session

    async def _settle(self) -> None:
        """Ends the answer that was interrupted or completed last, and takes note of what was committed."""
        answering, self._answering = self._answering, None
        if answering is not None and (said := await answering.settled()) is not None:
            self._said.append(said)
            self._version = (await answering.stream.result()).version

    async def _cut(self, session: AsyncRemoteSession, at: Place) -> None:
        """Cuts the session to the turns of `at`, and to what was heard of the last one."""
        if at.turns == len(self._said) and at.heard is None:
            return
        if at.heard is None:
            await self._rewind(session, turn=at.turns)
        else:
            last = self._said[at.turns - 1]
            kept = await self._tokens_of(last, at.heard)
            await self._rewind(session, position=last.start + kept)
            self._said[at.turns - 1] = last.heard(at.heard, last.tokens[:kept])
        del self._said[at.turns :]

    async def _rewind(self, session: AsyncRemoteSession, turn: int | None = None, position: int | None = None) -> None:
        if self._drafting:
            self._drafting = False
            with suppress(IllegalTransition):  # its time was over
                await session.abort()
        self._version = (await session.rewind(turn, position)).version

    async def _tokens_of(self, said: Said, heard: str) -> int:
        """Returns the largest number of the answer's tokens whose text is a part of what was heard."""
        whole = letters(_before(said.raw, said.text) + heard)
        least, most = 0, len(said.tokens)
        while least < most:
            tried = (least + most + 1) // 2
            if whole.startswith(letters(await self._engine.detokenize(said.tokens[:tried])).rstrip(UNFINISHED)):
                least = tried
            else:
                most = tried - 1
        while least and (await self._engine.detokenize(said.tokens[:least])).endswith(UNFINISHED):
            least -= 1
        return least


class Answering:
    """An answer that a separate task reads, so that a reader who leaves does not roll it back."""

    def __init__(self, given: list[dict[str, Any]], stream: AsyncRemoteTurnStream) -> None:
        self.stream = stream
        self._given = given
        self._parts = asyncio.Queue[AnswerPart | None]()
        self._reading = asyncio.create_task(self._read())
        self._aborting: asyncio.Task[Any] | None = None

    @property
    def ended(self) -> bool:
        """Whether no more of it will be given."""
        return self._aborting is not None or self._reading.done()

    async def _read(self) -> None:
        try:
            async for part in self.stream.parts():
                self._parts.put_nowait(part)
        finally:
            self._parts.put_nowait(None)

    async def parts(self) -> AsyncIterator[AnswerPart]:
        """Iterates over the answer. Raises the error that ended it."""
        while (part := await self._parts.get()) is not None:
            yield part
        await self._reading

    def interrupt(self) -> None:
        """Ends the answer with the tokens that have come; does not wait."""
        if not self._reading.done() and self._aborting is None:
            self._aborting = asyncio.create_task(self.stream.abort(keep="delivered"))

    async def settled(self) -> Said | None:
        """Waits until it has ended, now if it was still read. Returns what was committed, if anything."""
        self.interrupt()
        try:
            if self._aborting is not None:
                await self._aborting
            await self._reading
        except TenutoError:  # the answer's reader has it; the turn was rolled back
            return None
        result, message = await self.stream.result(), self.stream.message
        if not result.committed:
            return None
        calls = [call["id"] for call in message.get("tool_calls", ())]
        text = message["content"] or ""
        return Said(
            self._given,
            self.stream.text,
            text,
            calls,
            self.stream.token_ids,
            result.usage.prompt,
            isinstance(result.stop, str),
        )


class Speech:
    """The user's words since the last message: final transcripts, and one that may still change."""

    def __init__(self) -> None:
        self._messages = 0  # of the user, when the first of the transcripts came
        self._final: list[str] = []

    def so_far(self, messages: Sequence[Mapping[str, Any]], text: str, *, final: bool) -> dict[str, Any]:
        """Returns the user's message so far, with the next transcript. `messages`: those before it."""
        number = sum(message["role"] == "user" for message in messages)
        if number != self._messages:
            self._messages, self._final = number, []
        said = [*self._final, text]
        if final:
            self._final = said
        return {"role": "user", "content": " ".join(said)}
