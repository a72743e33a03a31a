"""The Python interface: one core, and a synchronous and an asynchronous face of it."""

from tenuto.api.aio import AsyncEngine, AsyncSession, AsyncTurnStream
from tenuto.api.sync import Engine, Session, TurnStream
from tenuto.base import errors
from tenuto.base.errors import TenutoError
from tenuto.base.options import TurnOptions
from tenuto.base.turns import EndReason, TurnResult, Usage
from tenuto.base.views import AuditReport, SessionInfo
from tenuto.text.prompt import Input

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
