"""The limits of tenants, which no command may exceed."""

from __future__ import annotations

from tenuto.base.config import Limits
from tenuto.base.errors import LimitReached
from tenuto.base.wire.messages import Draft, Fork, ImportSession, OpenSession, StartTurn, Trim
from tenuto.session.registry import Registry
from tenuto.session.session import Session

Limited = StartTurn | Draft | Fork | Trim | OpenSession | ImportSession
"""Commands that take more of what is limited."""


class TenantLimits:
    """Compares what tenants use with the limits that their commands name."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def check(self, command: Limited) -> list[Session]:
        """Returns the idle sessions that leave the device if the command is executed. Raises `LimitReached` if it would
        exceed a limit of its tenant, and `NotFound`."""
        use, limits = self._registry.used(command.tenant), command.limits
        if isinstance(command, OpenSession | ImportSession | Fork | Trim):
            _require_below(limits.sessions, use.sessions, f"{use.sessions} sessions are open", "close some first")
        if isinstance(command, OpenSession) and command.policy.pinned:
            _require_below(limits.pinned, use.pinned, f"{use.pinned} sessions are pinned", "close some first")
        brought = command.document.tokens if isinstance(command, ImportSession) else 0
        if limits.tokens is not None and (use.tokens >= limits.tokens or use.tokens + brought > limits.tokens):
            more = f", and this one has {brought}" if brought else ""
            raise LimitReached(
                f"sessions hold {use.tokens} tokens{more}; allowed: {limits.tokens}; close or rewind some first"
            )
        journaled = f"sessions have {use.journal_bytes} bytes in the journal"
        _require_below(limits.journal_bytes, use.journal_bytes, journaled, "close or rewind some first")
        leaving = self._leaving(command, limits.units) if limits.units is not None else []
        if isinstance(command, StartTurn | Draft | Fork | Trim) and command.session is not None:
            self._check_session(self._registry.get(command.session, command.tenant), limits)
        return leaving

    def check_replacement(self, session: Session, source: Session, limits: Limits) -> None:
        """Raises `LimitReached` if the history of `source` is longer than that of `session`, and would exceed a limit
        in its place. A hidden `source` does not count, since it is to be closed."""
        use, more = self._registry.used(session.policy.tenant), len(source.history) - len(session.history)
        held = use.tokens + more - (source.counted if source.policy.hidden else 0)
        remedy = "close or rewind some first, or make this one shorter"
        if more > 0:
            _require_at_most(limits.tokens, held, f"sessions would hold {held} tokens", remedy)
        grown = source.history_bytes - session.history_bytes
        if grown > 0 and session.policy.lasting:
            size = use.journal_bytes + grown  # a hidden session is not in the journal
            _require_at_most(limits.journal_bytes, size, f"sessions would have {size} bytes in the journal", remedy)

    def _leaving(self, command: Limited, most: int) -> list[Session]:
        """Returns the sessions that leave the device so that the tenant keeps fewer than `most` units there."""
        if self._registry.use(command.tenant).units < most:
            return []
        spared = getattr(command, "session", None)
        leaving, kept = self._registry.leaving(command.tenant, most, spared)
        stays = f"sessions keep {kept} units of memory that cannot yield now"
        _require_below(most, kept, stays, "wait for turns to end, or close or rewind some")
        return leaving

    def _check_session(self, session: Session, limits: Limits) -> None:
        units, size = self._registry.units_of(session), session.journal_bytes
        taken, journaled = f"takes {units} units of memory", f"has {size} bytes in the journal"
        _require_below(limits.session_units, units, f"session {session.id} {taken}", "rewind it first")
        _require_below(limits.session_journal_bytes, size, f"session {session.id} {journaled}", "rewind it first")


def _require_at_most(most: int | None, used: int, what: str, remedy: str) -> None:
    """Raises `LimitReached`, which says `what` would be used, if that is more than `most`."""
    if most is not None and used > most:
        raise LimitReached(f"{what}; allowed: {most}; {remedy}")


def _require_below(most: int | None, used: int, what: str, remedy: str) -> None:
    """Raises `LimitReached`, which says `what` is used, unless less than `most` is."""
    if most is not None and used >= most:
        raise LimitReached(f"{what}; allowed: {most}; {remedy}")
