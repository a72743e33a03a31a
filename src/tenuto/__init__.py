"""Tenuto: an LLM inference server in which the session, not the request, owns model state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenuto.api import AsyncEngine, Engine
    from tenuto.client import (
        AsyncRemoteEngine,
        AsyncRemoteSession,
        AsyncRemoteTurnStream,
        AsyncSession,
        AsyncTurnStream,
        AuditReport,
        EndReason,
        Input,
        RemoteEngine,
        RemoteOptions,
        RemoteSession,
        RemoteTurnStream,
        Session,
        SessionInfo,
        TenutoError,
        TurnOptions,
        TurnResult,
        TurnStream,
        Usage,
        connect,
        connect_async,
        errors,
    )

__all__ = [
    "AsyncEngine",
    "AsyncRemoteEngine",
    "AsyncRemoteSession",
    "AsyncRemoteTurnStream",
    "AsyncSession",
    "AsyncTurnStream",
    "AuditReport",
    "EndReason",
    "Engine",
    "Input",
    "RemoteEngine",
    "RemoteOptions",
    "RemoteSession",
    "RemoteTurnStream",
    "Session",
    "SessionInfo",
    "TenutoError",
    "TurnOptions",
    "TurnResult",
    "TurnStream",
    "Usage",
    "connect",
    "connect_async",
    "errors",
]


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that `import tenuto` and `tenuto --help` are fast."""
    if name not in __all__:
        raise AttributeError(f"module 'tenuto' has no attribute {name!r}")
    if name in ("AsyncEngine", "Engine"):  # all others load no model code
        from tenuto import api  # noqa: PLC0415 - see above

        return getattr(api, name)
    from tenuto import client  # noqa: PLC0415 - see above

    return getattr(client, name)


def __dir__() -> list[str]:
    return sorted(__all__)
