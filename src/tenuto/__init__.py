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

__all__ = [
    "AsyncEngine",
    "AsyncSession",
    "AsyncTurnStream",
    "AuditReport",
    "EndReason",
    "Engine",
    "Session",
    "SessionInfo",
    "TenutoError",
    "TurnResult",
    "TurnStream",
    "Usage",
    "errors",
]


def __getattr__(name: str) -> Any:
    """The public names, loaded when first used: `import tenuto` and `tenuto --help` are fast."""
    if name not in __all__:
        raise AttributeError(f"module 'tenuto' has no attribute {name!r}")
    from tenuto import api  # noqa: PLC0415 - see above

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
