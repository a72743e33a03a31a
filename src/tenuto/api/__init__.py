"""The Python interface: the client, and its engines in this process."""

from tenuto.api.engine import AsyncEngine, Engine
from tenuto.base import errors
from tenuto.base.errors import TenutoError
from tenuto.base.options import TurnOptions
from tenuto.base.turns import EndReason, Input, TurnResult, Usage
from tenuto.base.views import AuditReport, SessionInfo
from tenuto.client import AsyncSession, AsyncTurnStream, Session, TurnStream

__all__ = [
    "AsyncEngine",
    "AsyncSession",
    "AsyncTurnStream",
    "AuditReport",
    "EndReason",
    "Engine",
    "Input",
    "Session",
    "SessionInfo",
    "TenutoError",
    "TurnOptions",
    "TurnResult",
    "TurnStream",
    "Usage",
    "errors",
]
