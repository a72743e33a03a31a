"""The session interface over HTTP: one core, and a synchronous and an asynchronous face of it, as in `tenuto.api`."""

from tenuto.base.options import RemoteOptions
from tenuto.client.aio import AsyncRemoteEngine, AsyncRemoteSession, AsyncRemoteTurnStream, connect_async
from tenuto.client.sync import RemoteEngine, RemoteSession, RemoteTurnStream, connect

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
