"""Synchronous and asynchronous clients of an engine, and the transport that reaches one on a server. `api.transport`
has the one to an engine in this process."""

from tenuto.base import errors
from tenuto.base.errors import TenutoError
from tenuto.base.options import ChatOptions, RemoteOptions, TurnOptions
from tenuto.base.tokens import ForkedAt, SessionTokens, StateSpan, TurnTokens
from tenuto.base.tools.definitions import ToolCall
from tenuto.base.turns import EndReason, Input, OutputSpan, TurnResult, Usage
from tenuto.base.views import AuditReport, Compacted, Erased, SessionInfo
from tenuto.client.aio import AsyncSession, AsyncToolResults, AsyncTurnStream
from tenuto.client.compaction import CompactionOptions
from tenuto.client.remote import (
    AsyncRemoteEngine,
    AsyncRemoteSession,
    AsyncRemoteTurnStream,
    RemoteEngine,
    RemoteSession,
    RemoteTurnStream,
    connect,
    connect_async,
)
from tenuto.client.sync import Session, ToolResults, TurnStream

__all__ = [
    "AsyncRemoteEngine",
    "AsyncRemoteSession",
    "AsyncRemoteTurnStream",
    "AsyncSession",
    "AsyncToolResults",
    "AsyncTurnStream",
    "AuditReport",
    "ChatOptions",
    "Compacted",
    "CompactionOptions",
    "EndReason",
    "Erased",
    "ForkedAt",
    "Input",
    "OutputSpan",
    "RemoteEngine",
    "RemoteOptions",
    "RemoteSession",
    "RemoteTurnStream",
    "Session",
    "SessionInfo",
    "SessionTokens",
    "StateSpan",
    "TenutoError",
    "ToolCall",
    "ToolResults",
    "TurnOptions",
    "TurnResult",
    "TurnStream",
    "TurnTokens",
    "Usage",
    "connect",
    "connect_async",
    "errors",
]
