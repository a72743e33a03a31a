"""What both faces of the client do: every operation, as a request to the server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from tenuto.base.checks import MAX_COUNT, items, shown, whole
from tenuto.base.errors import InvalidRequest
from tenuto.base.options import OF_PREFILL, Policy, RemoteOptions
from tenuto.base.turns import TurnResult
from tenuto.base.views import AuditReport, SessionInfo
from tenuto.client.connection import Connection
from tenuto.client.feed import Deliver, Source, session_path
from tenuto.client.reader import TurnReader
from tenuto.client.wire import (
    input_body,
    session_info,
    turn_body,
    turn_result,
)
from tenuto.text.prompt import Input

PAGE = 1000
"""Sessions, or turns, that one request lists."""


class ServerCore:
    """A server. Its methods may be called from any thread."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.connection = Connection(url, api_key)

    def open(self, session_id: str | None, system: str | None, policy: Policy) -> Future[SessionCore]:
        body = {
            "id": session_id,
            "system": system,
            "ttl": policy.ttl,
            "priority": policy.priority,
            "max_tokens": policy.max_tokens,
        }
        return self.connection.call(self._opened("/v1/sessions", body))

    def attach(self, session_id: str) -> Future[SessionCore]:
        if not isinstance(session_id, str):
            raise InvalidRequest(f"a session's id is {shown(session_id)}; allowed: text")

        async def ask() -> SessionCore:
            return SessionCore(self, (await self.connection.ask("GET", session_path(session_id)))["id"])

        return self.connection.call(ask())

    async def _opened(self, path: str, body: dict[str, Any]) -> SessionCore:
        """A new session. One that was not given a name is closed with the connection."""
        session_id = (await self.connection.ask("POST", path, body))["id"]
        if body["id"] is None:
            self.connection.leftovers.add(session_path(session_id))
        return SessionCore(self, session_id)

    def new(self, session_id: str, action: str, body: dict[str, Any]) -> Future[SessionCore]:
        """A session made of another."""
        return self.connection.call(self._opened(f"{session_path(session_id)}/{action}", body))

    def generate(self, given: Input, options: RemoteOptions, deliver: Deliver) -> TurnReader:
        """The only turn of a session that is closed at its end."""
        prompt = input_body(given)
        if not prompt:
            raise InvalidRequest("the input is empty, and there is nothing to continue")
        body = {**turn_body(options), "input": prompt}
        return TurnReader(self.connection, Source(None, "turns", body), deliver)

    def context_length(self) -> Future[int]:
        async def ask() -> int:
            return int((await self.connection.ask("GET", "/v1/engine"))["context_length"])

        return self.connection.call(ask())

    def audit(self) -> Future[AuditReport]:
        async def ask() -> AuditReport:
            return msgspec.convert(await self.connection.ask("GET", "/audit"), AuditReport)

        return self.connection.call(ask())

    def sessions(self) -> Future[list[SessionInfo]]:
        async def ask() -> list[SessionInfo]:
            return [session_info(view) for view in await list_sessions(self.connection)]

        return self.connection.call(ask())


class SessionCore:
    """One session's operations."""

    def __init__(self, server: ServerCore, session_id: str) -> None:
        self.server = server
        self.id = session_id
        self._connection = server.connection
        self._path = session_path(session_id)

    def turn(self, given: Input, options: RemoteOptions, deliver: Deliver) -> TurnReader:
        body = {**turn_body(options), "input": input_body(given)}
        return TurnReader(self._connection, Source(self.id, "turns", body), deliver)

    def regenerate(self, options: RemoteOptions, deliver: Deliver) -> TurnReader:
        return TurnReader(self._connection, Source(self.id, "regenerate", turn_body(options)), deliver)

    def follow(self, turn_id: str, deliver: Deliver) -> TurnReader:
        return TurnReader(self._connection, Source(self.id, turn_id=str(turn_id)), deliver)

    def append(self, given: Input, options: RemoteOptions) -> Future[TurnResult]:
        body = {name: value for name, value in turn_body(options).items() if name in (*OF_PREFILL, "if_busy")}
        body["input"] = input_body(given)

        async def ask() -> TurnResult:
            return turn_result(await self._connection.ask("POST", f"{self._path}/append", body))

        return self._connection.call(ask())

    def draft(self, given: Input) -> Future[None]:
        body = {"input": input_body(given)}

        async def ask() -> None:
            await self._connection.ask("PUT", f"{self._path}/draft", body)

        return self._connection.call(ask())

    def abort(self) -> Future[None]:
        async def ask() -> None:
            await self._connection.ask("POST", f"{self._path}/abort", {})

        return self._connection.call(ask())

    def fork(self, turn: int | None, position: int | None, child: str | None) -> Future[SessionCore]:
        return self.server.new(self.id, "fork", {**_place(turn, position), "id": child})

    def trim(self, turns: Sequence[int], child: str | None) -> Future[SessionCore]:
        numbers = [whole("a turn's number", turn, 0, MAX_COUNT) for turn in items("turns", turns, "numbers of turns")]
        return self.server.new(self.id, "trim", {"turns": numbers, "id": child})

    def rewind(self, turn: int | None, position: int | None) -> Future[SessionInfo]:
        return self._info("POST", f"{self._path}/rewind", _place(turn, position))

    def info(self) -> Future[SessionInfo]:
        return self._info("GET", self._path)

    def _info(self, method: str, path: str, body: dict[str, Any] | None = None) -> Future[SessionInfo]:
        async def ask() -> SessionInfo:
            return session_info(await self._connection.ask(method, path, body))

        return self._connection.call(ask())

    def history(self) -> Future[list[int]]:
        async def ask() -> list[int]:
            records = await list_turns(self._connection, self.id)
            return [token for record in records for token in (*record["input_tokens"], *record["output_tokens"])]

        return self._connection.call(ask())

    def close(self, *, finish: bool) -> Future[None]:
        async def ask() -> None:
            await self._connection.ask("DELETE", self._path, finish="true" if finish else "false")
            self._connection.leftovers.discard(self._path)

        return self._connection.call(ask())


async def list_sessions(connection: Connection) -> list[dict[str, Any]]:
    """All sessions of the key's owner, as the server shows them."""
    sessions: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        page = await connection.ask("GET", "/v1/sessions", limit=PAGE, after=after)
        sessions += page["data"]
        after = page["next"]
    return sessions


async def list_turns(connection: Connection, session_id: str) -> list[dict[str, Any]]:
    """All committed turns of a session, as the server shows them."""
    turns: list[dict[str, Any]] = []
    first: int | None = 1
    while first is not None:
        page = await connection.ask("GET", f"{session_path(session_id)}/turns", first=first, limit=PAGE)
        turns += page["data"]
        first = page["next"]
    return turns


def _place(turn: int | None, position: int | None) -> dict[str, int | None]:
    given = {"turn": turn, "position": position}
    return {name: None if value is None else whole(name, value, 0, MAX_COUNT) for name, value in given.items()}
