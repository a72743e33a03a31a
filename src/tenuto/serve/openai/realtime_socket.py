"""OpenAI's Realtime for text: a conversation over one WebSocket, whose responses are turns of one session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Query, WebSocket

from tenuto.base.errors import IllegalTransition, InvalidRequest, SessionBusy, TenutoError, Unsupported
from tenuto.base.turns import EndReason
from tenuto.serve.openai.realtime_answer import CANCELLED, COMPLETED, FAILED, INCOMPLETE, RealtimeAnswer, usage_of
from tenuto.serve.openai.realtime_items import Content, Entry, Items, messages_for, new_id
from tenuto.serve.openai.realtime_line import GONE, Head, Line, Spoken
from tenuto.serve.openai.realtime_schemas import (
    AnswerSettings,
    ClientEvent,
    ItemCreate,
    ItemEvent,
    ItemTruncate,
    RealtimeSession,
    ResponseCancel,
    ResponseCreate,
    ResponseSettings,
    SessionUpdate,
)
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sockets import Fields, Refused, Service, SocketEvent, opened, read_as, text_in, type_of

router = APIRouter(prefix="/v1/realtime")

AUDIO = ("input_audio_buffer.", "output_audio_buffer.")
ENDS = ("committed", "aborted", "error")
"""The last events of a native turn."""
ATTEMPTS = 2
"""Number of times a response is begun, since its session may have been closed by others."""


class ResponseActive(SessionBusy):
    """`SessionBusy` with the code that OpenAI's clients expect."""

    code = "conversation_already_has_active_response"


@router.websocket("")
async def converse(socket: WebSocket, model: str | None = Query(None)) -> None:
    """Holds one conversation with a client, until it leaves."""

    async def check(edge: Edge, _: Tenant) -> None:
        edge.adapter(model)

    if (found := await opened(socket, check)) is not None:
        edge, _ = found
        await RealtimeSocket(socket, edge, model).serve()


class Response:
    """A response from its request to its end. `turn`: the id of its turn, once that has begun. `heard`: the number of
    characters that a client has heard of the message that was being written. `stopped`: a client has ended it."""

    def __init__(self, answer: RealtimeAnswer, line: Line) -> None:
        self.answer = answer
        self.line = line
        self.turn = ""
        self.prompt = 0
        self.heard: int | None = None
        self.stopped = False
        self.end: dict[str, Any] = {}  # the data of the turn's last event, with its name
        self.begun = asyncio.Event()  # set once the turn has begun, or never will


class RealtimeSocket(Service):
    """One client's conversation. Its messages are handled in order; a response is written beside them."""

    def __init__(self, socket: WebSocket, edge: Edge, model: str | None) -> None:
        super().__init__(socket, edge)
        self._settings = RealtimeSession.model_validate({})
        self._items = Items(edge.settings.max_body_bytes)
        self._conversation, self._name = new_id("conv"), new_id("sess")
        self._adapter = edge.adapter(model) or None
        self._line = Line(self.ask, self._name, self._adapter)
        self._response: Response | None = None  # the one that is being written
        self._writing: asyncio.Task[None] | None = None  # writes it, or wrote the latest one

    async def serve(self) -> None:
        await self._tell("session.created", session=self._view())
        try:
            await super().serve()
        finally:
            await self._written()
            await self._line.close()

    async def answer(self, fields: Fields) -> None:
        given = text_in(fields, "type")
        if given.startswith(AUDIO):
            raise Unsupported(f"type is {given[:80]}, and this server takes no audio; allowed: text", param="type")
        kind, handle = HANDLERS[type_of(fields, HANDLERS)]
        await handle(self, await read_as(kind, fields))

    def refusal(self, failure: Failure, fields: Fields) -> dict[str, Any]:
        return self._error(failure, text_in(fields, "event_id"))

    # -- messages

    async def update(self, event: SessionUpdate) -> None:
        """Changes the settings that are given."""
        given = event.session
        if given.model is not None and (self.edge.adapter(given.model) or None) != self._adapter:
            raise InvalidRequest("the model of a session cannot change", param="session.model")
        self._settings = _over(self._settings, given)
        await self._tell("session.updated", session=self._view())

    async def create_item(self, event: ItemCreate) -> None:
        """Adds an item, and computes it ahead of its response if nothing else is to be done."""
        entry = Entry(event.item.id or new_id("item"), Content.of(event.item))
        before = self._items.put(entry, event.previous_item_id)
        for name in ("added", "done"):
            await self._tell(f"conversation.item.{name}", previous_item_id=before, item=entry.view())
        if self._response is None and not self.pressed and entry.content.role != "assistant":
            await self._draft()

    async def show_item(self, event: ItemEvent) -> None:
        """Shows an item."""
        await self._tell("conversation.item.retrieved", item=self._items.find(event.item_id).view())

    async def delete_item(self, event: ItemEvent) -> None:
        """Removes an item."""
        self._items.remove(event.item_id)
        await self._tell("conversation.item.deleted", item_id=event.item_id)

    async def truncate(self, event: ItemTruncate) -> None:
        """Cuts an answer to its part that was heard, and the session with it. If it is being written, it ends
        there."""
        entry, response = self._items.find(event.item_id), self._response
        if (entry.content.type, entry.content.role) != ("message", "assistant"):
            raise InvalidRequest("only an assistant's message can be truncated", param="item_id")
        kept, writing = event.kept(), response is not None and response.answer.writes(entry)
        length = response.answer.length if response is not None and writing else len(entry.content.text)
        if kept > length:
            raise InvalidRequest(f"text_end is {kept}; allowed: at most {length}, the item's length", param="text_end")
        if response is not None and writing:
            response.heard = kept
            await self._stop(response, response.answer.tokens_until(kept))
        if len(entry.content.text) > kept:
            entry.content = Content("message", "assistant", entry.content.text[:kept])
        if self._response is None and self._line.open:
            with suppress(Refused):  # then the next response does it
                await self._line.go_to(self._head(self._settings), self._contents())
        place = {"item_id": entry.id, "content_index": 0, "audio_end_ms": event.audio_end_ms}
        await self._tell("conversation.item.truncated", **place, text_end=kept)

    async def respond(self, event: ResponseCreate) -> None:
        """Begins a response."""
        if self._response is not None:
            raise ResponseActive("a response is being written; allowed: to wait for response.done, or to cancel it")
        own = event.response or ResponseSettings.model_validate({})
        await self._written()
        settings, apart = _over(self._settings, own), own.conversation == "none"
        context = self._context(own)
        contents, head = [entry.content for entry in context], self._head(settings)
        about = {
            "conversation_id": None if apart else self._conversation,
            "metadata": own.metadata,
            "output_modalities": settings.view()["output_modalities"],
            "max_output_tokens": settings.view()["max_output_tokens"],
        }
        places = [context[-1].id if context and own.input is None else None]

        def add(entry: Entry) -> str | None:
            before = self._items.insert(entry, places[-1])
            places.append(entry.id)
            return before

        main = not apart and own.input is None and head == self._head(self._settings)
        line = self._line if main else await self._line.branch(head, contents)
        response = Response(RealtimeAnswer(about, None if apart else add), line)
        self._response = response
        self._writing = asyncio.ensure_future(self._write(response, settings, head, contents, event.event_id))

    async def cancel(self, event: ResponseCancel) -> None:
        """Ends the response that is being written. The part that was written stays."""
        response = self._response
        if response is None or event.response_id not in (None, response.answer.id):
            raise IllegalTransition("no such response is being written", param="response_id")
        await self._stop(response, "delivered")

    # -- responses

    async def _write(
        self, response: Response, settings: AnswerSettings, head: Head, contents: list[Content], event_id: str
    ) -> None:
        line = response.line
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    await self._run(response, settings, head, contents)
                    break
                except Refused as refused:
                    if attempt == ATTEMPTS or refused.failure.code not in GONE:
                        raise
                    line.lost()
        except (TenutoError, Refused) as error:
            failure = error.failure if isinstance(error, Refused) else Failure.of(error)
            await self.send(self._error(failure, event_id))
        finally:
            self._response = None
            response.begun.set()
            if line is not self._line:
                await line.close()

    async def _run(self, response: Response, settings: AnswerSettings, head: Head, contents: list[Content]) -> None:
        line, answer = response.line, response.answer
        have = await line.go_to(head, contents)
        given = self._messages(line, settings, contents[have:])

        async def heard(event: SocketEvent) -> None:
            data = msgspec.json.decode(event.data)
            if event.name == "started":
                response.turn, response.prompt = data["turn_id"], data["prompt_tokens"]
                response.begun.set()
                await self._tell_all(answer.begin())
            elif event.name == "delta":
                await self._tell_all(answer.read(data))
            elif event.name in ENDS:
                response.end = {**data, "event": event.name}

        await self.ask("POST", f"{line.path}/turns", {"input": given, "stream": True, **settings.options()}, heard)
        status, details = _outcome(response)
        usage = usage_of(response.end["usage"]) if "usage" in response.end else None
        whole = answer.contents
        last = answer.finish(status, details, usage, response.heard)
        if response.end.get("committed"):
            cut = response.end["reason"] == EndReason.ABORT  # otherwise it has ended first, and is cut afterwards
            said = answer.contents if cut else whole
            line.committed(Spoken(tuple(contents[have:]), said, response.prompt, answer.marks))
        self._response = None
        await self._tell_all(last)

    async def _stop(self, response: Response, keep: int | str) -> None:
        """Ends a response, and waits for its end."""
        await response.begun.wait()
        response.stopped = True
        if response.turn and not response.end:
            try:
                await self.ask("POST", f"{response.line.path}/abort", {"keep": keep, "turn_id": response.turn})
            except Refused as refused:
                if refused.failure.code != IllegalTransition.code:  # it has just ended
                    raise
        await self._written()

    async def _written(self) -> None:
        """Waits for the end of the latest response."""
        if self._writing is not None:
            await self._writing

    async def _draft(self) -> None:
        """Computes the items that wait for a response. Functions are part of the first turn, not of a draft."""
        contents, line = self._contents(), self._line
        if not line.turns and self._settings.tools:
            return
        try:
            have = await line.go_to(self._head(self._settings), contents)
            await line.draft(self._messages(line, self._settings, contents[have:]))
        except Refused:
            return  # the response will be refused for the same reason, or computes them itself

    # -- the conversation

    def _contents(self) -> list[Content]:
        return [entry.content for entry in self._items.all()]

    def _context(self, own: ResponseSettings) -> Sequence[Entry]:
        """Returns the items that a response answers."""
        if own.input is None:
            return self._items.all()
        context = []
        for item in own.input:
            if item.type == "item_reference":
                context.append(self._items.find(item.id or "", "response.input"))
            else:
                context.append(Entry(item.id or new_id("item"), Content.of(item)))
        return context

    def _head(self, settings: AnswerSettings) -> Head:
        return settings.instructions or "", msgspec.json.encode(settings.definitions()).decode()

    def _messages(self, line: Line, settings: AnswerSettings, contents: Sequence[Content]) -> list[dict[str, Any]]:
        return messages_for(contents, self.edge.model.habits, settings.instructions, begun=bool(line.turns))

    # -- events

    def _view(self) -> dict[str, Any]:
        model = self.edge.name_of(self._adapter)
        return {
            **self._settings.view(),
            "type": "realtime",
            "object": "realtime.session",
            "id": self._name,
            "model": model,
        }

    async def _tell(self, kind: str, **fields: Any) -> None:
        await self.send({"type": kind, "event_id": new_id("event"), **fields})

    async def _tell_all(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            await self.send({**event, "event_id": new_id("event")})

    def _error(self, failure: Failure, event_id: str) -> dict[str, Any]:
        told = {**failure.body["error"], "event_id": event_id or None}
        return {"type": "error", "event_id": new_id("event"), "error": told}


S = TypeVar("S", bound=AnswerSettings)


def _over(settings: S, own: AnswerSettings) -> S:
    """Returns settings with those that `own` has in their place."""
    given = {name: getattr(own, name) for name in AnswerSettings.model_fields}
    return settings.model_copy(update={name: value for name, value in given.items() if value is not None})


def _outcome(response: Response) -> tuple[str, dict[str, Any]]:
    """Returns the status of a response that has ended, and its details."""
    end = response.end
    if response.stopped and end.get("reason") == EndReason.ABORT:
        return CANCELLED, {"reason": "client_cancelled"}
    if not end.get("committed"):
        error = end.get("error") or {"type": "server_error", "code": end.get("reason"), "message": "the turn failed"}
        return FAILED, {"error": {name: error[name] for name in ("type", "code", "message")}}
    return (INCOMPLETE, {"reason": "max_output_tokens"}) if end["reason"] == EndReason.LENGTH else (COMPLETED, {})


HANDLERS: dict[str, tuple[type[ClientEvent], Callable[[RealtimeSocket, Any], Awaitable[None]]]] = {
    "session.update": (SessionUpdate, RealtimeSocket.update),
    "conversation.item.create": (ItemCreate, RealtimeSocket.create_item),
    "conversation.item.retrieve": (ItemEvent, RealtimeSocket.show_item),
    "conversation.item.delete": (ItemEvent, RealtimeSocket.delete_item),
    "conversation.item.truncate": (ItemTruncate, RealtimeSocket.truncate),
    "response.create": (ResponseCreate, RealtimeSocket.respond),
    "response.cancel": (ResponseCancel, RealtimeSocket.cancel),
}
