"""Realtime responses whose turns end at chosen moments, by an application that is told what to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from fastapi import WebSocket

from tenuto.base.errors import IllegalTransition
from tenuto.base.tools.definitions import ModelHabits
from tenuto.serve.openai.realtime_schemas import ItemCreate, ItemTruncate, ResponseCancel, ResponseCreate
from tenuto.serve.openai.realtime_socket import RealtimeSocket
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.sockets import OnEvent, Refused, SocketEvent

CALL = {"id": "call_1", "name": "weather", "arguments": "{}"}
PROMPT = 5
"""Number of tokens before every answer."""


class Scripted(RealtimeSocket):
    """A conversation whose turns tell `deltas`, and end once they are aborted. `too_late`: the turn has ended by itself
    just before. `requests`: those to sessions. `told`: the messages to the client."""

    def __init__(self, deltas: Sequence[dict[str, Any]], *, too_late: bool) -> None:
        edge: Any = SimpleNamespace(
            settings=SimpleNamespace(max_body_bytes=2**20),
            model=SimpleNamespace(habits=ModelHabits()),
            adapter=lambda _: None,
            name_of=lambda _: "scripted",
        )
        super().__init__(cast("WebSocket", None), cast("Edge", edge), None)
        self._deltas, self._too_late = deltas, too_late
        self._aborted, self.all_told = asyncio.Event(), asyncio.Event()
        self.requests: list[tuple[str, Any]] = []
        self.told: list[dict[str, Any]] = []

    async def send_json(self, message: bytes) -> None:
        self.told.append(msgspec.json.decode(message))

    async def ask(self, method: str, path: str, value: Any = None, on_event: OnEvent | None = None) -> Any:
        action = path.rpartition("/")[2]
        if method == "POST":
            self.requests.append((action, value))
        if on_event is not None:
            await self._turn(on_event)
        elif action == "abort":
            self._aborted.set()
            if self._too_late:
                raise Refused(Failure.of(IllegalTransition("no turn is open")))

    async def _turn(self, on_event: OnEvent) -> None:
        async def event(name: str, /, **data: Any) -> None:
            await on_event(SocketEvent(name, "", msgspec.json.encode(data)))

        await event("started", turn_id="turn-1", prompt_tokens=PROMPT)
        for delta in self._deltas:
            for call in delta.get("tool_calls", ()):
                await event("call", index=0, **call)
            await event("delta", **delta)
        self.all_told.set()
        await self._aborted.wait()
        await event("committed", committed=True, reason="length" if self._too_late else "abort")

    async def answering(self, *, clear: bool = True) -> None:
        """Begins a response, whose deltas are all told when this returns. `clear`: forgets the requests until then."""
        self.all_told.clear()
        question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
        item = {"type": "conversation.item.create", "item": question, "event_id": ""}
        await self.create_item(ItemCreate.model_validate(item))
        await self.respond(ResponseCreate.model_validate({"type": "response.create"}))
        await self.all_told.wait()
        if clear:
            self.requests.clear()

    async def cut(self, kept: int) -> list[tuple[str, Any]]:
        """Begins a response, cuts the message that is being written, and returns what was asked then."""
        await self.answering()
        added = [told["item"]["id"] for told in self.told if told["type"] == "response.output_item.added"]
        cut = {"type": "conversation.item.truncate", "item_id": added[-1], "text_end": kept}
        await self.truncate(ItemTruncate.model_validate(cut))
        return self.requests


def test_an_answer_that_ends_just_before_it_is_cut_is_cut_all_the_same() -> None:
    async def scene() -> None:
        deltas = [{"content": text, "delivered": n} for n, text in enumerate(("One, ", "two, ", "three."), 1)]
        asked = await Scripted(deltas, too_late=True).cut(6)
        assert asked == [("abort", {"keep": 1, "turn_id": "turn-1"}), ("rewind", {"position": PROMPT + 1})]

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_an_answer_that_is_cut_while_it_is_written_is_not_cut_again() -> None:
    async def scene() -> None:
        deltas = [{"content": text, "delivered": n} for n, text in enumerate(("One, ", "two, ", "three."), 1)]
        assert await Scripted(deltas, too_late=False).cut(6) == [("abort", {"keep": 1, "turn_id": "turn-1"})]

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_text_after_a_call_is_cut_by_its_own_tokens() -> None:
    async def scene() -> None:
        deltas = [
            {"content": "Let me see.", "delivered": 3},
            {"tool_calls": [CALL], "delivered": 9},
            {"content": "It may ", "delivered": 11},
            {"content": "rain.", "delivered": 12},
        ]
        assert await Scripted(deltas, too_late=False).cut(8) == [("abort", {"keep": 11, "turn_id": "turn-1"})]
        assert await Scripted(deltas, too_late=False).cut(2) == [("abort", {"keep": 9, "turn_id": "turn-1"})]

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_an_answer_is_cancelled_after_a_call() -> None:
    async def scene() -> None:
        conversation = Scripted([{"tool_calls": [CALL], "delivered": 9}], too_late=False)
        await conversation.answering()
        await conversation.cancel(ResponseCancel.model_validate({"type": "response.cancel"}))
        assert conversation.requests == [("abort", {"keep": "delivered", "turn_id": "turn-1"})]

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_an_answer_that_is_cancelled_before_its_first_token_is_not_continued() -> None:
    async def scene() -> None:
        conversation = Scripted([], too_late=False)
        await conversation.answering()
        await conversation.cancel(ResponseCancel.model_validate({"type": "response.cancel"}))
        assert conversation.requests == [("abort", {"keep": "delivered", "turn_id": "turn-1"})]
        conversation.requests.clear()
        await conversation.answering(clear=False)
        (rewind, place), (turns, asked) = conversation.requests
        assert (rewind, place, turns) == ("rewind", {"turn": 0}, "turns")
        assert [message["content"] for message in asked["input"]] == ["hello", "hello"]

    asyncio.run(asyncio.wait_for(scene(), 20))
