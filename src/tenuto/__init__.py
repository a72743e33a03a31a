"""Tenuto: an LLM inference server in which the session, not the request, owns model state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenuto.api import (
        AsyncEngine,
        AsyncSession,
        AsyncTurnStream,
        AuditReport,
        EndReason,
        Engine,
        Session,
        SessionInfo,
        TenutoError,
        TurnResult,
        TurnStream,
        Usage,
        errors,
    )
    from tenuto.client import (
        AsyncRemoteEngine,
        AsyncRemoteSession,
        AsyncRemoteTurnStream,
        RemoteEngine,
        RemoteSession,
        RemoteTurnStream,
        connect,
        connect_async,
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
    "RemoteEngine",
    "RemoteSession",
    "RemoteTurnStream",
    "Session",
    "SessionInfo",
    "TenutoError",
    "TurnResult",
    "TurnStream",
    "Usage",
    "connect",
    "connect_async",
    "errors",
]
_OF_CLIENT = frozenset(name for name in __all__ if "Remote" in name or name.startswith("connect"))


def __getattr__(name: str) -> Any:
    """The public names, loaded when first used: `import tenuto` and `tenuto --help` are fast."""
    if name not in __all__:
        raise AttributeError(f"module 'tenuto' has no attribute {name!r}")
    if name in _OF_CLIENT:  # which loads no model code
        from tenuto import client  # noqa: PLC0415 - see above

        return getattr(client, name)
    from tenuto import api  # noqa: PLC0415 - see above

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
