"""The transport to a server over HTTP."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tenuto.base.tools.tool_use import ToolUse
from tenuto.base.views import Compacted, SessionInfo
from tenuto.base.wire.messages import CloseSession, EraseSession, ExportSession, ImportSession, StartTurn
from tenuto.base.wire.request import Request
from tenuto.base.wire.state_file import StateFile
from tenuto.client.compaction import compacted_from, compaction_body
from tenuto.client.connection import Connection
from tenuto.client.feed import Feed, Source
from tenuto.client.transport import Deliver, Options, RunningTurn
from tenuto.client.wire import (
    SERVER_OPTIONS,
    answer_from,
    exchange_of,
    if_match,
    input_body,
    session_path,
    tools_body,
    turn_body,
    version_in,
)

T = TypeVar("T")

_ACTIONS = {"turn": "turns", "append": "append", "regenerate": "regenerate"}


class HttpTransport:
    """Sends requests over HTTP to the server at `url`. Closing it closes the sessions that it opened without an id."""

    options = SERVER_OPTIONS

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises `InvalidRequest` if `url` is not a valid address."""
        self.connection = Connection(url, api_key)

    def call(self, request: Request[T]) -> Future[T]:
        return self.connection.call(self._ask(request))

    async def _ask(self, request: Request[T]) -> T:
        method, path, body, query = exchange_of(request)
        unnamed = body is not None and body.get("id", "") is None  # only the answer has the id of the session to close
        with self.connection.unbroken() if unnamed else nullcontext():
            said = await self._send(request, method, path, body, query or {})
            answer = answer_from(request, said)
            if isinstance(answer, SessionInfo) and unnamed:
                self.connection.leftovers.add(session_path(answer.session_id))
            if isinstance(request, CloseSession | EraseSession):
                self.connection.leftovers.discard(path)
            return answer

    async def _send(self, request: Any, method: str, path: str, body: Any, query: dict[str, Any]) -> Any:
        """Sends a request, with the file of its state, and returns the answer's JSON."""
        match request:
            case ExportSession(state=str(file)):
                await self.connection.download(path + "/state", Path(file))
                return await asyncio.to_thread(_document_of, Path(file))
            case ImportSession(state=str(file)):
                return await self.connection.upload(path + "/state", Path(file), **query)
            case _:
                return await self.connection.ask(method, path, body, **query)

    def start(self, request: StartTurn, options: Options, use: ToolUse | None, deliver: Deliver) -> RunningTurn:
        return Feed(self.connection, source_of(request, options, use), deliver)

    def follow(self, session: str, turn_id: str, deliver: Deliver) -> RunningTurn:
        """Reads all events of a turn that was started earlier."""
        return Feed(self.connection, Source(session, turn_id=str(turn_id)), deliver)

    def compact(self, session: str, first: int, last: int | None, options: Options) -> Future[Compacted]:
        body, version = compaction_body(first, last, options), version_in(options)
        return self.connection.call(self._compact(session_path(session), body, version))

    async def _compact(self, path: str, body: dict[str, Any], version: int | None) -> Compacted:
        return compacted_from(await self.connection.ask("POST", f"{path}/compact", body, if_match(version)))

    def request_stop(self) -> None:
        self.connection.request_stop()

    def close(self) -> None:
        self.connection.close()


def source_of(request: StartTurn, options: Options, use: ToolUse | None) -> Source:
    """Returns how to start a turn on a server; see `Transport.start`. Raises `InvalidRequest`."""
    body = turn_body(request.kind, request.params, options)
    if use is not None:
        body |= tools_body(request.kind, use)
    if request.kind != "regenerate":
        body["input"] = input_body(request.input)
    return Source(request.session, _ACTIONS[request.kind], body, version=version_in(options))


def _document_of(path: Path) -> Any:
    with closing(StateFile(path)) as file:
        return msgspec.to_builtins(file.document)
