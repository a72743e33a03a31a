"""The HTTP client of `tenuto bench`. It shares its machine with the server that it measures, so it is one that parses
with compiled code, and does little more for a token than to note when it came."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx
import msgspec

from tenuto.base.errors import Disconnected, Unreachable
from tenuto.client.sse import EventParser
from tenuto.client.wire import error_from

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0
"""How long an idle connection is kept: less than servers do, so that requests do not meet a closed one."""


class BenchHttp:
    """Requests to the server at `url`, any number at once. Belongs to one event loop; errors are `TenutoError`s."""

    def __init__(self, url: httpx.URL, api_key: str | None = None) -> None:
        self.url = url
        self._base = str(url).rstrip("/")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            proxy=_proxy(self.url),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """A server's answer, from JSON; `None` if it is something else. Raises the error that it is."""
        with _typed_errors():
            async with self._http.request(method, self._base + path, data=_json(body)) as answer:
                content = await _checked(answer)
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.DecodeError:
            return None

    async def events(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[float, str, Any]]:
        """The events of a stream: when they came, their names and their data. Raises the error that one reports."""
        parser = EventParser()
        with _typed_errors():
            async with self._http.post(self._base + path, data=_json(body), headers=headers) as answer:
                if answer.status >= 400:
                    await _checked(answer)
                while piece := await answer.content.readany():
                    when = time.perf_counter()
                    for event in parser.feed(piece):
                        if event.data == "[DONE]":
                            continue
                        data = msgspec.json.decode(event.data)
                        if "error" in data:
                            raise error_from(500, event.data.encode())
                        yield when, event.name, data


def _proxy(url: httpx.URL) -> str | None:
    """The one that the environment names. Asked once: aiohttp would do it for every request, and read `~/.netrc`."""
    return None if proxy_bypass(url.host) else getproxies().get(url.scheme)


def _json(body: dict[str, Any] | None) -> bytes | None:
    return None if body is None else msgspec.json.encode(body)


async def _checked(answer: aiohttp.ClientResponse) -> bytes:
    content = await answer.read()
    if answer.status >= 400:
        raise error_from(answer.status, content)
    return content


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Turn errors of the network into `Unreachable` and `Disconnected`."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise Unreachable(f"there is no connection to the server: {str(error) or type(error).__name__}") from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Disconnected(f"the connection to the server broke: {str(error) or type(error).__name__}") from error
