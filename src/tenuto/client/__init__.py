"""The session interface over HTTP: one core, and a synchronous and an asynchronous face of it, as in `tenuto.api`."""

from tenuto.client.aio import AsyncRemoteEngine, AsyncRemoteSession, AsyncRemoteTurnStream, connect_async
from tenuto.client.sync import RemoteEngine, RemoteSession, RemoteTurnStream, connect
from tenuto.client.wire import RemoteOptions

__all__ = [
    "AsyncRemoteEngine",
    "AsyncRemoteSession",
    "AsyncRemoteTurnStream",
    "RemoteEngine",
    "RemoteOptions",
    "RemoteSession",
    "RemoteTurnStream",
    "connect",
    "connect_async",
]
