"""Compares the registry's counts and indexes for each tenant with a scan of all sessions."""

from __future__ import annotations

from typing import TypedDict, get_args

from tenuto.base.errors import InvariantError
from tenuto.base.views import StateFilter
from tenuto.session.registry import Registry

STATES = (None, *get_args(StateFilter))


class OfTenant(TypedDict):
    """The tenant of a session, as keyword arguments of the engine's operations."""

    tenant: str


def check_tenants(registry: Registry) -> None:
    """Raises `InvariantError` at the first difference."""
    for tenant in sorted({session.policy.tenant for session in registry}):
        theirs = sorted((s for s in registry if s.policy.tenant == tenant), key=lambda session: session.id)
        shown = [s for s in theirs if not (s.policy.ephemeral or s.policy.hidden)]
        middle = theirs[len(theirs) // 2].id
        for state in STATES:
            for after in ("", middle):
                wanted = [s for s in shown if s.id > after and state in (None, s.state.value, s.turn_state)]
                if (found := list(registry.listed(tenant, after, state))) != wanted:
                    raise InvariantError(
                        f"sessions of {tenant!r} after {after!r} in state {state}: {found}, not {wanted}"
                    )
        use = registry.use(tenant)
        resting = sorted(
            (s for s in theirs if s.turn is None and s.memory.computed and not s.policy.pinned),
            key=lambda s: (s.last_turn_end, s.id),
        )
        if (found := list(use.resting())) != resting:
            raise InvariantError(f"sessions of {tenant!r} that rest on the device: {found}, not {resting}")
        if use.pinned != (pinned := sum(s.policy.pinned for s in theirs)):
            raise InvariantError(f"{tenant!r} has {use.pinned} pinned sessions, not {pinned}")
        units = sum(s.memory.kept_units for s in resting)
        counted = sum(s.counted_units for s in theirs)
        if (use.resting_units, use.units) != (units, counted):
            raise InvariantError(f"{tenant!r}: {use.units} units, {use.resting_units} at rest; not {counted}, {units}")
        for most in (0, 1, units // 2, use.units, use.units + 1):
            check_leaving(registry, tenant, most, middle)


def check_leaving(registry: Registry, tenant: str, most: int, spared: str) -> None:
    """Checks that the sessions chosen to leave make enough room, and that the last of them is needed for that."""
    leaving, kept = registry.leaving(tenant, most, spared)
    use, order = registry.use(tenant), [s for s in registry.use(tenant).resting() if s.id != spared]
    if kept >= most and leaving:
        raise InvariantError(f"{leaving} leave {tenant!r} with {kept} units, not fewer than {most}")
    if leaving != order[: len(leaving)] or (leaving and kept + leaving[-1].counted_units < most):
        raise InvariantError(f"{leaving} leave first for {most} units, of {order}")
    rest = sum(s.counted_units for s in (leaving or (order if kept >= most else [])))
    if kept != use.units - rest:
        raise InvariantError(f"{kept} units are reported as kept of {use.units}, when {rest} leave")
