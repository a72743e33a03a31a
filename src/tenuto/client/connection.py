"""HTTP requests and WebSockets to one server, on an event loop in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as websocket
from websockets.exceptions import InvalidStatus, WebSocketException

from tenuto.base.errors import Disconnected, EngineStopped, InvalidRequest, TenutoError, Unreachable
from tenuto.base.wire.state_file import replacing
from tenuto.client.wire import encode, error_from

T = TypeVar("T")

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0
"""Time for which an idle connection is kept; shorter than on servers, so that no request meets a closed one."""
END_SECONDS = 5.0
"""Maximum time that closing waits for each of three things: sessions being opened, cancelled requests, and the deletion
of `leftovers`."""
PIECE = 2**20
"""Bytes of a file sent or received at once."""
MAX_DELETIONS = 32
"""Maximum number of concurrent deletions of `leftovers`."""


class Connection:
    """Sends requests to the server at `url`. Its coroutines run in its own thread, started by `call`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises `InvalidRequest` if `url` is not a valid address."""
        self._key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(
            base_url=checked_url(url),
            headers=self._key,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # turns may take any time
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_SECONDS),
        )
        self.leftovers: set[str] = set()  # paths of sessions to delete on closing; used only in its own thread
        self._unbroken: set[asyncio.Task[Any]] = set()  # tasks to wait for; used only in its own thread
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._lock = threading.RLock()  # reentrant: a finalizer may stop it in the middle of anything
        self._thread = threading.Thread(
            target=_run,
            args=(self._loop, self._http, self.leftovers, self._unbroken),
            name="tenuto-client",
            daemon=True,
        )
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs `work` in the connection's thread. Raises `EngineStopped` if the connection was closed."""
        with self._lock:
            if self._stopped:
                work.close()
                raise EngineStopped("the connection to the server was closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """Protects the current task: inside the block, closing waits for it, up to `END_SECONDS`, before it cancels."""
        task = asyncio.current_task()
        assert task is not None
        self._unbroken.add(task)
        try:
            yield
        finally:
            self._unbroken.discard(task)

    def request_stop(self) -> None:
        """Cancels requests in progress and ends the thread, without waiting."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._loop.call_soon_threadsafe(self._loop.stop)  # after everything that `call` has accepted

    def close(self) -> None:
        """Does `request_stop` and waits for the thread."""
        self.request_stop()
        self._thread.join()

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, **query: Any
    ) -> Any:
        """Sends a request and decodes the JSON answer. Raises the server's error, `Unreachable` or `Disconnected`."""
        async with self.stream(method, path, body, headers, **query) as response:
            content = await response.aread()
        if not content:
            return None
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise TenutoError(f"the server's answer is not valid JSON: {error}; is this a Tenuto server?") from error

    async def download(self, path: str, target: Path) -> None:
        """Writes an answer to a file, piece by piece. An existing file is replaced once the answer is complete. Raises
        the errors of `ask`, and `InvalidRequest` if the file cannot be written."""
        async with self.stream("GET", path) as response:
            with replacing(target) as file:
                async for piece in response.aiter_bytes(PIECE):
                    await asyncio.to_thread(file.write, piece)

    async def upload(self, path: str, source: Path, **query: Any) -> Any:
        """Sends a request like `ask`, with a file as the body, read piece by piece."""

        async def pieces() -> AsyncIterator[bytes]:
            with source.open("rb") as file:
                while piece := await asyncio.to_thread(file.read, PIECE):
                    yield piece

        async with self.stream("POST", path, pieces(), **query) as response:
            return msgspec.json.decode(await response.aread())

    async def socket(self, path: str) -> ClientConnection:
        """Opens a WebSocket. Raises the server's error or `Unreachable`."""
        try:
            return await websocket(
                str(self._http.base_url).replace("http", "ws", 1).rstrip("/") + path,
                additional_headers=self._key,
                compression=None,
                open_timeout=CONNECT_SECONDS,
                close_timeout=END_SECONDS,
                ping_timeout=None,  # a server may be busy for any time
                max_size=None,
            )
        except InvalidStatus as error:
            raise error_from(error.response.status_code, bytes(error.response.body or b"")) from error
        except (OSError, WebSocketException) as error:
            raise Unreachable(f"there is no WebSocket to the server: {str(error) or type(error).__name__}") from error

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, **query: Any
    ) -> AsyncIterator[httpx.Response]:
        """Sends a request like `ask`; the answer is read in the block, where a broken connection raises `Disconnected`.
        A `body` that is an async iterator of bytes is sent as it is, any other as JSON."""
        raw = isinstance(body, AsyncIterator)
        content = body if raw or body is None else encode(body)
        if content is not None:
            kind = "application/octet-stream" if raw else "application/json"
            headers = {"content-type": kind, **(headers or {})}
        with typed_errors():
            sending = self._http.stream(method, path, content=content, headers=headers, params=query or None)
            async with sending as response:
                if response.status_code >= 400:
                    raise error_from(response.status_code, await response.aread())
                yield response


def checked_url(url: object) -> httpx.URL:
    """Parses the address of a server. Raises `InvalidRequest` if it is not valid."""
    try:
        checked = httpx.URL(url)  # type: ignore[arg-type] # checked here
    except (httpx.InvalidURL, TypeError) as error:
        raise InvalidRequest(f"{url!r} is not the address of a server: {error}") from None
    if checked.scheme not in ("http", "https") or not checked.host:
        raise InvalidRequest(f"{url!r} is not the address of a server; allowed: http://HOST:PORT or https://HOST")
    return checked


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turns errors of the network into `Unreachable` and `Disconnected`."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Unreachable(f"there is no connection to the server: {str(error) or type(error).__name__}") from error
    except (httpx.TransportError, httpx.StreamError, httpx.DecodingError) as error:
        raise Disconnected(f"the connection to the server broke: {str(error) or type(error).__name__}") from error


def _run(
    loop: asyncio.AbstractEventLoop, http: httpx.AsyncClient, leftovers: set[str], unbroken: set[asyncio.Task[Any]]
) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(_end(http, leftovers, unbroken))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _end(http: httpx.AsyncClient, leftovers: set[str], unbroken: set[asyncio.Task[Any]]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            while unbroken:
                await asyncio.wait(set(unbroken))
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=END_SECONDS)
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await _delete(http, leftovers)
    await http.aclose()


async def _delete(http: httpx.AsyncClient, paths: set[str]) -> None:
    """Deletes each path, ignoring failures."""

    async def work() -> None:
        while paths:
            await http.delete(paths.pop())

    await asyncio.gather(*(work() for _ in range(MAX_DELETIONS)), return_exceptions=True)
