"""The Python interface: one core, and a synchronous and an asynchronous face of it."""

from tenuto.api.aio import AsyncEngine, AsyncSession, AsyncTurnStream
from tenuto.api.sync import Engine, Session, TurnStream
from tenuto.base import errors
from tenuto.base.errors import TenutoError
from tenuto.memory.audit import AuditReport
from tenuto.session.info import SessionInfo
from tenuto.session.options import TurnOptions
from tenuto.session.turn import EndReason, TurnResult, Usage
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
