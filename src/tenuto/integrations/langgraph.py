"""LangGraph on sessions: `pip install tenuto[langgraph]`. An answer of `TenutoChat` contains its place in a session.
Checkpointers keep that with the messages. So a graph that goes on from any checkpoint, also in another process, goes on
from the state of the model there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import ConfigDict, Field, PrivateAttr

from tenuto.base.errors import NotFound, SessionBusy, SessionClosed, VersionMismatch
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.client import RemoteEngine, RemoteSession, RemoteTurnStream, connect
from tenuto.integrations.chats import native_message

PLACE = "tenuto"
"""The key in an answer's `response_metadata` for its place: the id of its `session`, the number of its `turn` and the
session's `version` after it, and the number of `messages` up to there, with their `digest`. If a stop was cut from the
answer, which the session would still have, the place is before its turn."""


class TenutoChat(BaseChatModel):
    """A chat model on a server. Sessions are never changed behind an answer that a checkpoint may have: where it is not
    the last one, its session is forked. Edited conversations, and sessions that are closed, begin anew."""

    url: str
    """The server's."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Those of every turn."""
    ttl: float | None = None
    """Seconds without a turn after which the server closes a session."""
    api_key: str | None = Field(default=None, repr=False, exclude=True)

    model_config = ConfigDict(extra="forbid")
    _engine: RemoteEngine = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._engine = connect(self.url, self.api_key)

    @property
    def engine(self) -> RemoteEngine:
        """The client of the server."""
        return self._engine

    @property
    def _llm_type(self) -> str:
        return "tenuto"

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: str | None = None, **options: Any
    ) -> Runnable[Any, AIMessage]:
        """Returns the model with tools. `tool_choice`: as in OpenAI's API, or "any", or a function's name."""
        choice: Any = "required" if tool_choice == "any" else tool_choice
        if choice not in (None, "auto", "none", "required"):
            choice = {"name": choice}
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], tool_choice=choice, **options)

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **options: Any
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **options))

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **options: Any
    ) -> Iterator[ChatGenerationChunk]:
        given = {**self.options, "tools": [], **options, **({"stop": stop} if stop else {})}
        session, place, turn = self._begin(messages, given)
        with turn:
            for part in turn.parts():
                chunk = ChatGenerationChunk(message=_chunk(part))
                if run_manager is not None:
                    run_manager.on_llm_new_token(part.text, chunk=chunk)
                yield chunk
            result = turn.result()
        used = result.usage
        answer = AIMessage(
            turn.message["content"] or "",
            tool_calls=[{"name": call.name, "args": call.parsed(), "id": call.id} for call in turn.tool_calls],
        )
        if isinstance(result.stop, str):  # the session has the stop, which the answer lacks
            place["version"] = session.rewind(turn=place["turn"]).version
        else:
            answered = [*messages, answer]
            place |= {"turn": place["turn"] + 1, "version": result.version, "messages": len(answered)}
            place["digest"] = digests(answered, given["tools"])[-1]
        last = AIMessageChunk(
            content="",
            chunk_position="last",
            response_metadata={PLACE: place, "finish_reason": str(result.reason)},
            usage_metadata={
                "input_tokens": used.prompt,
                "output_tokens": used.generated,
                "total_tokens": used.prompt + used.generated,
                "input_token_details": {"cache_read": used.cached},
            },
        )
        yield ChatGenerationChunk(message=last)

    def _begin(
        self, messages: list[BaseMessage], options: dict[str, Any]
    ) -> tuple[RemoteSession, dict[str, Any], RemoteTurnStream]:
        """Starts a turn behind the last place that an answer names. Returns its session, and the place."""
        known = digests(messages, options["tools"])
        for number in range(len(messages) - 1, 0, -1):
            place = place_of(messages[number - 1])
            start = number if place is None else place.get("messages", number)
            if place is None or start > number or place["digest"] != known[start]:
                continue
            with suppress(NotFound, SessionClosed):
                session, new = self._engine.attach(place["session"]), _native(messages[start:])
                try:
                    turn = session.turn(new, if_version=place["version"], **options)
                except (VersionMismatch, SessionBusy):
                    session = session.fork(turn=place["turn"], session_id=_new_id())
                    turn = session.turn(new, **options)
                return session, place | {"session": session.id, "messages": start}, turn
        session = self._engine.session(_new_id(), ttl=self.ttl)
        place = {"session": session.id, "turn": 0, "messages": 0, "digest": known[0]}
        return session, place, session.turn(_native(messages), **options)


class ThreadSessions(BaseCheckpointSaver[Any]):
    """A mixin of checkpointers: `class Saver(ThreadSessions, SqliteSaver)`. With a thread, it closes the thread's
    sessions. Threads that were copied from it begin anew in others."""

    engine: RemoteEngine

    def delete_thread(self, thread_id: str) -> None:
        sessions = self._sessions_of(thread_id)
        super().delete_thread(thread_id)
        for session in sessions:
            with suppress(NotFound, SessionClosed):
                self.engine.attach(session).close()

    async def adelete_thread(self, thread_id: str) -> None:
        await asyncio.to_thread(self.delete_thread, thread_id)

    def _sessions_of(self, thread_id: str) -> set[str]:
        """Returns the sessions that answers in the thread's checkpoints are in."""
        found = self.list({"configurable": {"thread_id": thread_id}})
        values = (value for each in found for value in each.checkpoint["channel_values"].values())
        answers = (answer for value in values for answer in (value if isinstance(value, list) else [value]))
        return {place["session"] for answer in answers if (place := place_of(answer)) is not None}


class TenutoSaver(ThreadSessions, InMemorySaver):
    """LangGraph's checkpointer in memory, with `ThreadSessions`."""

    def __init__(self, model: TenutoChat, **options: Any) -> None:
        """`model`: the one whose sessions the threads have."""
        super().__init__(**options)
        self.engine = model.engine


def place_of(message: object) -> dict[str, Any] | None:
    """Returns the place of an answer, or `None` for other objects."""
    return message.response_metadata.get(PLACE) if isinstance(message, AIMessage) else None


def digests(messages: Sequence[BaseMessage], tools: Sequence[Any]) -> list[str]:
    """Returns digests of the beginnings of a conversation with 0, 1, ... and all of the messages, and of its tools.
    Calls count by their ids, since checkpointers change the layout of arguments."""
    found = [_digest(tools)]
    for message in _native(messages):
        calls = [call["id"] for call in message.get("tool_calls", ())]
        found.append(_digest([found[-1], message["role"], message["content"], message.get("tool_call_id"), calls]))
    return found


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _native(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    return [native_message(message) for message in convert_to_openai_messages(messages)]


def _new_id() -> str:
    """Returns an id: sessions without one would be closed with the client."""
    return f"langgraph-{secrets.token_hex(12)}"


def _chunk(part: AnswerPart) -> AIMessageChunk:
    calls = [{"name": call.name, "args": call.arguments, "id": call.id, "index": None} for call in part.calls]
    thoughts = {"reasoning_content": part.reasoning} if part.reasoning else {}
    return AIMessageChunk(content=part.text, tool_call_chunks=calls, additional_kwargs=thoughts)
