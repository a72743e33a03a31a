"""A turn on a server: receives its events and reconnects as needed."""

from __future__ import annotations

import asyncio
import secrets
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from tenuto.base.errors import Disconnected, EngineStopped, TenutoError, Unreachable
from tenuto.base.tools.answers import Reading
from tenuto.base.turns import Delta, Keep, TurnResult
from tenuto.base.wire.bodies import read_body
from tenuto.client.connection import Connection
from tenuto.client.sse import EventParser, ServerEvent
from tenuto.client.transport import Deliver, RunningTurn
from tenuto.client.wire import error_from, if_match, session_path

PATIENCE_SECONDS = 30.0
"""Time for which to keep reconnecting without receiving anything new."""
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
ONE_SHOT_TTL = 60.0
"""TTL, in seconds, of a one-shot turn's session, in case the client disappears."""


@dataclass(frozen=True, slots=True)
class Source:
    """How to start or find a turn: posting `body` to a session's `action` starts one, in a new session if `session` is
    `None`, and only if it has `version`, if given. Without `body`, the turn `turn_id` was started earlier."""

    session: str | None
    action: str = "turns"
    body: dict[str, Any] | None = None
    turn_id: str | None = None
    version: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers that require the version."""
        return if_match(self.version)

    @property
    def continues(self) -> bool:
        """Whether the turn continues when its connection breaks."""
        return self.body is None or self.body.get("on_disconnect") == "continue"


class Feed(RunningTurn):
    """A turn on a server. Its coroutines run in the connection's thread."""

    def __init__(self, connection: Connection, source: Source, deliver: Deliver) -> None:
        super().__init__(deliver)
        self.turn_id = source.turn_id
        self._connection = connection
        self._source = source
        self._path = session_path(source.session) if source.session is not None else ""
        self._position = 0  # the number of the last event
        self._received = (0, 0)  # tokens, and characters of text
        self._delivered = 0
        self._key = secrets.token_hex(16)  # allows retrying a start whose answer was lost
        self._running: Future[None] | None = None
        self._running = connection.call(self._run())

    def disconnect(self) -> None:
        """Drops the connection. The turn's option `on_disconnect` decides what the server does."""
        if self._running is not None:
            self._running.cancel()

    def _end(self, keep: Keep) -> Future[Any]:
        return self._connection.call(self._abort({"keep": "none" if keep is None else keep, "turn_id": self.turn_id}))

    async def _abort(self, body: dict[str, Any]) -> Any:
        return await self._connection.ask("POST", f"{self._path}/abort", body)

    @property
    def _starting(self) -> dict[str, str]:
        """The headers of the request that starts the turn."""
        return {**self._source.headers, **({"idempotency-key": self._key} if self._source.continues else {})}

    async def _run(self) -> None:
        """Delivers all events, the last of which has the result or an error."""
        try:
            last = await (self._one_shot() if self._source.session is None else self._whole())
        except TenutoError as error:
            self.fail(error)
        except asyncio.CancelledError:
            self.fail(EngineStopped("the connection to the server was closed"))
            raise
        except Exception as error:  # noqa: BLE001 - the waiting reader must get it
            self.fail(TenutoError(f"the server's answer is not valid: {error!r}"))
        else:
            self.take(last)

    async def _one_shot(self) -> Delta:
        opened = await self._connection.ask("POST", "/v1/sessions", {"ttl": ONE_SHOT_TTL})
        self._path = session_path(opened["id"])
        try:
            return await self._follow()
        finally:
            with suppress(TenutoError):
                await self._connection.ask("DELETE", self._path)

    async def _whole(self) -> Delta:
        """Runs the turn on an open session and returns its last event. An append is not streamed: it has no other
        events."""
        if self._source.action != "append":
            return await self._follow()
        turn = await self._append()
        self.accept()
        return Delta(result=read_body(TurnResult, turn))

    async def _append(self) -> Any:
        return await self._connection.ask("POST", f"{self._path}/append", self._source.body, self._source.headers)

    async def _follow(self) -> Delta:
        """Delivers all events but the last, and returns that. If the connection breaks and the turn continues without
        it, reconnects."""
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, FIRST_PAUSE
        while True:
            position = self._position
            try:
                return await self._read()
            except Unreachable:
                if self.turn_id is None:
                    raise
                broken: TenutoError = Disconnected("the connection to the server broke, and there is no new one")
            except Disconnected as error:
                if not self._source.continues:
                    raise Disconnected(
                        f"{error}; the turn is rolled back, as on_disconnect is not 'continue'"
                    ) from error
                broken = error
            if self._position > position:
                deadline, pause = time.monotonic() + PATIENCE_SECONDS, FIRST_PAUSE
            if time.monotonic() > deadline:
                raise broken
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _read(self) -> Delta:
        """Reads one connection to its end: delivers all events but the turn's last, and returns that."""
        if self.turn_id is None:
            request = ("POST", f"{self._path}/{self._source.action}", self._source.body, self._starting)
        else:
            headers = {"last-event-id": str(self._position)} if self._position else {}
            request = ("GET", f"{self._path}/turns/{self.turn_id}/events", None, headers)
        parser, last = EventParser(), None
        try:
            async with self._connection.stream(*request) as response:
                async for piece in response.aiter_bytes():
                    for event in parser.feed(piece):
                        last = self._read_event(event) or last
        except Disconnected:
            if last is None:
                raise
        return last or await self._look_up()

    def _read_event(self, event: ServerEvent) -> Delta | None:
        """Delivers an event; returns the turn's last one instead."""
        if event.name == "error":
            raise error_from(500, event.data.encode())
        body = msgspec.json.decode(event.data)
        match event.name:
            case "started":
                self.turn_id = body["turn_id"]
                self.reading = msgspec.convert(body["reading"], Reading) if "reading" in body else None
                self.accept()
            case "delta" if event.id and (body["tokens"] or body["text"]):  # parsed parts alone: we parse ourselves
                self._position, self._delivered = int(event.id), body["delivered"]
                self._received = (self._received[0] + len(body["tokens"]), self._received[1] + len(body["text"]))
                self.take(Delta(tuple(body["tokens"]), body["text"], self._delivered))
            case "committed" | "aborted":
                return Delta((), "", self._delivered, read_body(TurnResult, body))
        return None

    async def _look_up(self) -> Delta:
        """Asks the server for the result after a stream that ended without it. Raises `Disconnected` if output is
        missing, too."""
        if self.turn_id is not None and self._source.continues:
            turn = await self._connection.ask("GET", f"{self._path}/turns/{self.turn_id}")
            if turn["usage"] is not None and (len(turn["tokens"]), len(turn["text"])) == self._received:
                return Delta((), "", self._delivered, read_body(TurnResult, turn))
        raise Disconnected("the stream of the turn ended before the turn")
