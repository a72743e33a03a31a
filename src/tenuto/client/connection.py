"""HTTP to one server, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import httpx
import msgspec

from tenuto.base.errors import Disconnected, EngineStopped, InvalidRequest, TenutoError, Unreachable
from tenuto.client.wire import encode, error_from

T = TypeVar("T")

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0
"""How long a connection is kept for the next request: less than servers keep it, so that none is found closed."""
END_SECONDS = 5.0
"""How long requests may take to end when the connection is closed, and how long what it leaves to be deleted."""
MAX_DELETIONS = 32
"""Of them, at the same time."""


class Connection:
    """Requests to the server at `url`. Its coroutines are for its own thread; `call` brings them there."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises `InvalidRequest` if that is no address."""
        self._http = httpx.AsyncClient(
            base_url=checked_url(url),
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # turns take as long as they take
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_SECONDS),
        )
        self.leftovers: set[str] = set()  # paths that are deleted at the end; for its own thread
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._lock = threading.RLock()  # reentrant: a finalizer may stop it in the middle of anything
        self._thread = threading.Thread(
            target=_run, args=(self._loop, self._http, self.leftovers), name="tenuto-client", daemon=True
        )
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Have `work` done in the connection's thread. Raises `EngineStopped` if it was closed."""
        with self._lock:
            if self._stopped:
                work.close()
                raise EngineStopped("the connection to the server was closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def request_stop(self) -> None:
        """End what is under way, and the thread; do not wait."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._loop.call_soon_threadsafe(self._loop.stop)  # after all that `call` has let in

    def close(self) -> None:
        """As `request_stop`, and wait."""
        self.request_stop()
        self._thread.join()

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, **query: Any
    ) -> Any:
        """The server's answer, from JSON. Raises the error it answers with, `Unreachable` or `Disconnected`."""
        async with self.stream(method, path, body, headers, **query) as response:
            content = await response.aread()
        if not content:
            return None
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise TenutoError(f"the server's answer is not understood: {error}; is it one of Tenuto's?") from error

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, **query: Any
    ) -> AsyncIterator[httpx.Response]:
        """As `ask`, with an answer still to be read: within the block a broken connection raises `Disconnected`."""
        content = None if body is None else encode(body)
        headers = {"content-type": "application/json", **(headers or {})} if content is not None else headers
        with typed_errors():
            sending = self._http.stream(method, path, content=content, headers=headers, params=query or None)
            async with sending as response:
                if response.status_code >= 400:
                    raise error_from(response.status_code, await response.aread())
                yield response


def checked_url(url: object) -> httpx.URL:
    """Raises `InvalidRequest` if that is no address of a server."""
    try:
        checked = httpx.URL(url)  # type: ignore[arg-type] # whatever the caller gave
    except (httpx.InvalidURL, TypeError) as error:
        raise InvalidRequest(f"{url!r} is no address of a server: {error}") from None
    if checked.scheme not in ("http", "https") or not checked.host:
        raise InvalidRequest(f"{url!r} is no address of a server; allowed: http://HOST:PORT or https://HOST")
    return checked


@contextmanager
def typed_errors() -> Iterator[None]:
    """What goes wrong between here and a server is `Unreachable` or `Disconnected`."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Unreachable(f"there is no connection to the server: {str(error) or type(error).__name__}") from error
    except (httpx.TransportError, httpx.StreamError, httpx.DecodingError) as error:
        raise Disconnected(f"the connection to the server broke: {str(error) or type(error).__name__}") from error


def _run(loop: asyncio.AbstractEventLoop, http: httpx.AsyncClient, leftovers: set[str]) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(_end(http, leftovers))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _end(http: httpx.AsyncClient, leftovers: set[str]) -> None:
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
    """Each path, as far as the server can be reached."""

    async def work() -> None:
        while paths:
            await http.delete(paths.pop())

    await asyncio.gather(*(work() for _ in range(MAX_DELETIONS)), return_exceptions=True)
