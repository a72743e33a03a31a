"""Runs the server: a link to the engine process, an HTTP server, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import math
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, cast

import structlog
import uvicorn

from tenuto.base.config import trace_exporters
from tenuto.base.errors import ConfigError, EngineStopped, ModelError, TenutoError
from tenuto.base.views import ModelView
from tenuto.base.wire.link import Link
from tenuto.serve.app import build_app, form_of
from tenuto.serve.engine_process import EngineProcess
from tenuto.serve.fleet.fleet import Fleet
from tenuto.serve.metrics import Metrics
from tenuto.serve.process import ProcessLink
from tenuto.serve.protocol import BoundedProtocol, BoundedSocket, ConnectionLimits
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.settings import ServeSettings
from tenuto.serve.unread import SEND_BUFFER_BYTES, UnreadConnections, WatchedConnection

if TYPE_CHECKING:
    from tenuto.serve.tracing import Tracing

log = structlog.get_logger("tenuto.server")

CLOSING_SECONDS = 2.0
"""The least time that connections have to end once their turns have ended."""
CHECK_SECONDS = 0.1
QUIET_SECONDS = 1.0
"""How long connections are kept after a drain: clients that have just got their answers may ask on."""
BACKLOG = 2048
"""Connections that the system accepts before we do."""
OTHER_FILES = 64
"""Number of open files other than connections."""


class EndingServer(uvicorn.Server):
    """A uvicorn server that leaves signals to us, so that the exit status is 0 after SIGTERM and turns end before
    connections."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends, once all connections have."""
        await self.accept_no_more(sockets or ())
        asking = asyncio.ensure_future(self._ask())
        try:
            await super().shutdown(sockets)
        finally:
            asking.cancel()

    async def accept_no_more(self, sockets: Iterable[socket.socket]) -> None:
        """Closes the listening sockets, after the connections are accepted that clients have opened: these would be
        reset. Idle connections are closed."""
        config, state = self.config, self.server_state

        def protocol() -> asyncio.Protocol:
            kind = cast("Callable[..., asyncio.Protocol]", config.http_protocol_class)
            return kind(config=config, server_state=state, app_state=self.lifespan.state)

        for listening in sockets:
            if listening.fileno() < 0:  # closed before
                continue
            listening.settimeout(0)
            with suppress(BlockingIOError):
                while True:
                    connection, _ = listening.accept()
                    await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        for server in self.servers:
            server.close()
        for listening in sockets:
            listening.close()
        self.close_idle()

    def close_idle(self) -> None:
        """Lets HTTP connections end that have not been asked to."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedProtocol) and not connection.closing:
                connection.shutdown()

    async def _ask(self) -> None:
        """Asks connections to end that were accepted too late for uvicorn to ask them."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.close_idle()


def bind(settings: ServeSettings) -> socket.socket:
    """Returns a socket at the server's address that does not listen yet; port 0 picks a free port. Raises
    `ConfigError`."""
    bound = None
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((settings.host, settings.port))
    except OSError as error:
        if bound is not None:
            bound.close()
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error}") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
    return bound


def listen(bound: socket.socket) -> None:
    """Lets clients connect. Raises `ConfigError`."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:  # another process has begun to listen there
        raise ConfigError(f"cannot listen on {bound.getsockname()[1]}: {error}") from error


def _connections(wanted: int) -> int:
    """Returns the number of connections the process may have, at most `wanted`. Raises the limit on open files as far
    as needed and possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - OTHER_FILES))


async def serve(
    engine: EngineProcess,
    settings: ServeSettings,
    ready: Callable[[ModelView, str], None] = lambda *_: None,
    *,
    in_fleet: bool = False,
) -> None:
    """Serves `engine` over HTTP until SIGTERM or SIGINT. `in_fleet`: it is a replica of a fleet. `ready` is called with
    the model and the address once requests are accepted. Raises `ModelError` or `ConfigError`, or `EngineStopped` if
    the engine ends by itself, once open requests are answered."""
    tracing = _tracing()
    try:
        with bind(settings) as listening:
            if not in_fleet:
                listen(listening)  # clients wait while the model is loaded; those of a fleet can ask another replica
            try:
                link = await ProcessLink.open(engine)
            except EngineStopped as error:
                raise ModelError(f"{error} before its model was loaded") from error
            try:
                await _serve(link, link.model, settings, listening, ready, tracing, in_fleet=in_fleet)
            finally:
                await link.close()
    finally:
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def _tracing() -> Tracing | None:
    """Returns what traces turns if OpenTelemetry's variables ask for it. Raises `ConfigError`."""
    exporters = trace_exporters()
    if not exporters:
        return None
    try:
        from tenuto.serve.tracing import Tracing  # noqa: PLC0415 - needs the extra `otel`
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"OpenTelemetry's variables ask for traces, but {error.name} is not installed; allowed: pip install "
            "'tenuto[otel]', or OTEL_TRACES_EXPORTER=none"
        ) from error
    return Tracing.to(exporters)


async def _serve(
    link: Link,
    model: ModelView,
    settings: ServeSettings,
    listening: socket.socket,
    ready: Callable[[ModelView, str], None],
    tracing: Tracing | None,
    *,
    in_fleet: bool,
) -> None:
    edge, metrics = Edge(link, model, settings), Metrics()
    fleet = await Fleet.enter(edge) if in_fleet else None
    limits = ConnectionLimits(_connections(settings.max_connections), settings.header_seconds)
    protocol = partial(BoundedProtocol, limits, lambda status: metrics.request_ended("other", None, status), form_of)
    app = build_app(edge, metrics, fleet)
    if tracing is not None:
        tracing.attach(app, edge)
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        ws=BoundedSocket,
        ws_max_size=settings.max_body_bytes,
        ws_per_message_deflate=False,
        timeout_keep_alive=settings.keep_alive_seconds,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # nothing depends on a client's address
    )
    if in_fleet:
        listen(listening)
    server, ending = EndingServer(config), asyncio.Event()

    def end() -> None:
        edge.hurried = ending.is_set()  # the second signal: do not wait for turns
        ending.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    unread = UnreadConnections(server.server_state.connections, settings.unread_seconds)
    watching = asyncio.ensure_future(unread.watch())
    host, port = listening.getsockname()[:2]
    ready(model, f"http://{host if ':' not in host else f'[{host}]'}:{port}")
    ends = {serving, asyncio.ensure_future(ending.wait()), asyncio.ensure_future(link.ended())}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    asked = ending.is_set()
    log.info("ending", open_turns=len(edge.turns.open_turns()))
    deadline = time.monotonic() + settings.drain_seconds
    if link.stopped is None:
        if fleet is not None and asked:
            await _leave(server, listening, fleet, deadline)
        await edge.drain(deadline - time.monotonic())
    await _close(server, serving, edge, unread, deadline)
    if fleet is not None:
        await fleet.close()
    for task in (watching, *ends):
        task.cancel()
    if link.stopped is not None and not asked:
        raise link.stopped.error()


async def _leave(server: EndingServer, listening: socket.socket, fleet: Fleet, deadline: float) -> None:
    """Lets the sessions of this replica move to others, if there are any, and waits until its clients have their
    answers, or until the deadline. New requests are passed on as long as there is something else to wait for."""
    try:
        fleet.drain.begin(await fleet.replicas())
    except TenutoError:  # no other replica, or no database: as with a single server
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline - time.monotonic()):
            await fleet.drain.leave()
            await asyncio.sleep(QUIET_SECONDS)
            await server.accept_no_more([listening])
            await fleet.drain.wait()
    fleet.drain.hurry()


async def _close(
    server: EndingServer, serving: asyncio.Future[None], edge: Edge, unread: UnreadConnections, deadline: float
) -> None:
    """Ends the connections. Clients that read late have until the deadline to read the ends of their answers."""
    left = max(0.0, deadline - time.monotonic())
    server.config.timeout_graceful_shutdown = math.ceil(left + 2 * CLOSING_SECONDS)  # what goes on then is cancelled
    server.should_exit = True
    await asyncio.wait({serving}, timeout=CLOSING_SECONDS / 2)
    for connection in list(server.server_state.connections):
        if not isinstance(connection, WatchedConnection):  # a WebSocket, whose client was notified
            connection.transport.abort()
    while not (serving.done() or edge.hurried or edge.link.stopped is not None) and time.monotonic() < deadline:
        await asyncio.wait({serving}, timeout=CHECK_SECONDS)
    unread.give_up()
    await asyncio.wait({serving}, timeout=CLOSING_SECONDS / 2)
    for connection in list(server.server_state.connections):
        connection.transport.abort()  # of streams that go on elsewhere
    await serving
