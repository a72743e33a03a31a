"""The feed of the map: its changes, for all viewers, at most four times a second.

Without viewers, the engine is not asked anything. With viewers, one question is for all of them. A viewer that reads
slowly gets all changes since it last read as one event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tenuto.base.errors import Overloaded, TenutoError
from tenuto.base.map_feed import About
from tenuto.base.wire.messages import Look
from tenuto.serve.map_state import Head, MapState, Shown, visible
from tenuto.serve.shared.client import client_of
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import EVENTS, event, until_disconnected

INTERVAL = 0.25
"""The least number of seconds between two looks, and between two events for a viewer."""
FILLING = 0.03
"""The number of seconds between two looks while the engine has nothing to do and has not told everything yet."""
MAX_VIEWERS = 64
COMPLETE_SECONDS = 5.0
"""How long the answer to a single request waits for all sessions; without those that are missing it then says so."""


class Viewer:
    """A viewer, with the changes since the last event for it. It sees the sessions of `tenant`, or all (`None`)."""

    def __init__(self, tenant: Tenant) -> None:
        self.caller = tenant
        self.tenant = None if tenant.admin else tenant.name
        self.changed: dict[int, Shown] = {}
        self.gone: dict[int, None] = {}
        self.news = asyncio.Event()

    def tell(self, changed: dict[int, Shown], gone: dict[int, str]) -> None:
        """Adds a look's changes. `gone`: the numbers of sessions that are gone, with their tenants."""
        self.changed |= changed
        for number, tenant in gone.items():
            self.changed.pop(number, None)
            if self.tenant in (None, tenant):
                self.gone[number] = None
        self.news.set()

    def take(self, head: Head) -> bytes:
        """Returns the event with all that has changed since the last one."""
        changed, gone = visible(self.changed.items(), self.tenant), list(self.gone)
        self.changed, self.gone = {}, {}
        self.news.clear()
        return event("change", _body(head, self, changed, gone=gone))


class MapFeed:
    """The viewers, and the state of the map while there are any."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._viewers: set[Viewer] = set()
        self._state = MapState()
        self._head: Head | None = None
        self._complete = False  # all sessions have been described
        self._begun = self._ended = 0  # numbers of looks
        self._asking: asyncio.Task[None] | None = None
        self._error: TenutoError | None = None

    @property
    def ending(self) -> bool:
        """Whether the server is ending, and the feed with it."""
        return self._edge.draining

    @contextmanager
    def viewer(self, tenant: Tenant) -> Iterator[Viewer]:
        """Lets one more look for the duration of the block. Raises `Overloaded`."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers look at the map, the most allowed; try again later")
        viewer = Viewer(tenant)
        self._viewers.add(viewer)
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())
        elif self._head is not None:
            viewer.news.set()
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    async def _ask(self) -> None:
        """Asks the engine as long as there are viewers."""
        self._state, self._head, self._error = MapState(), None, None
        self._complete = False
        loop, again, fresh = asyncio.get_running_loop(), list[int](), True
        try:
            while self._viewers:
                began, self._begun = loop.time(), self._begun + 1
                part = await self._edge.link.call(Look(fresh=fresh, again=again))
                news = await asyncio.to_thread(self._state.read, part)
                gone = {number: self._state.sessions.pop(number).tenant for number in news.gone}
                changed = self._state.take(news)
                self._head, again, fresh = news.head, news.again, False
                self._complete = self._complete or not news.more
                self._ended = self._begun
                for viewer in self._viewers:
                    viewer.tell(changed, gone)
                pause = FILLING if news.more and not part.running else INTERVAL
                await asyncio.sleep(max(0.0, began + pause - loop.time()))
            self._head = None  # one who comes now waits for the next first look
            with suppress(TenutoError):
                await self._edge.link.call(Look(end=True))
        except TenutoError as error:
            self._error = error
        finally:
            self._asking = None
            for viewer in self._viewers:
                viewer.news.set()
            if self._viewers and self._error is None:  # one has come since the last look
                self._asking = asyncio.ensure_future(self._ask())

    async def first(self, viewer: Viewer) -> Head:
        """Waits for the first look. Raises the error that prevents it."""
        while self._head is None:
            if self._error is not None:
                raise self._error
            await viewer.news.wait()
            viewer.news.clear()
        return self._head

    async def whole(self, tenant: Tenant) -> bytes:
        """Returns the map as JSON, as a look shows it that begins after this call, once all sessions have been
        described or `COMPLETE_SECONDS` are over."""
        with self.viewer(tenant) as viewer:
            before = self._begun
            head = await self.first(viewer)
            with suppress(TimeoutError):
                async with asyncio.timeout(COMPLETE_SECONDS):
                    while self._error is None and not (self._complete and self._ended > before):
                        viewer.news.clear()
                        await viewer.news.wait()
            return bytes(self.picture(viewer, self._head or head))

    def picture(self, viewer: Viewer, head: Head) -> msgspec.Raw:
        """Returns the whole map as a viewer sees it, as JSON."""
        keyed = bool(self._edge.settings.tenants)
        about = About(
            model=self._edge.served_name,
            compute=self._edge.model.compute,
            tenant=viewer.caller.name if keyed else None,
            admin=viewer.caller.admin,
            pools=self._state.pools,
        )
        viewer.changed, viewer.gone = {}, {}
        viewer.news.clear()
        return _body(head, viewer, visible(self._state.sessions.items(), viewer.tenant), about=about)

    async def events(self, viewer: Viewer) -> bytes:
        """Returns the next event for a viewer. Raises the error that ends the feed."""
        await viewer.news.wait()
        if self._error is not None or self._head is None:
            raise self._error or Overloaded("the feed has begun anew; connect again")
        return viewer.take(self._head)


def _body(
    head: Head,
    viewer: Viewer,
    sessions: list[bytes],
    *,
    gone: list[int] | None = None,
    about: About | None = None,
) -> msgspec.Raw:
    parts = [
        b'{"head":',
        head.whole if viewer.tenant is None else head.own,
        b',"sessions":[',
        b",".join(sessions),
        b"]",
    ]
    if gone:
        parts += [b',"gone":', msgspec.json.encode(gone)]
    if about is not None:
        parts += [b',"about":', msgspec.json.encode(about)]
    return msgspec.Raw(b"".join([*parts, b"}"]))


class FeedStream(Response):
    """The feed as server-sent events: `map`, then `change`s, and `error` if the engine stops."""

    def __init__(self, feed: MapFeed, viewer_of: Tenant) -> None:
        super().__init__(None, 200, {"cache-control": "no-store", "x-accel-buffering": "no"}, EVENTS)
        del self.headers["content-length"]
        self._feed = feed
        self._tenant = viewer_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await until_disconnected(scope, receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        with self._feed.viewer(self._tenant) as viewer:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if (client := client_of(scope)) is not None:
                client.begin_events()
            try:
                head = await self._feed.first(viewer)
                await self._put(event("map", self._feed.picture(viewer, head)), send)
                while not self._feed.ending:
                    await asyncio.sleep(INTERVAL)
                    await self._put(await self._feed.events(viewer), send)
            except TenutoError as error:
                await self._put(event("error", {"code": error.code, "message": error.message}), send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _put(part: bytes, send: Send) -> None:
        """Sends an event, and waits while the client's buffers are full."""
        await send({"type": "http.response.body", "body": part, "more_body": True})
