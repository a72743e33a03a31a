"""The use of tenants with limits in a fleet: here, as this replica reports it to the others, and elsewhere, as the
others have reported it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from tenuto.base.fleet_views import TenantUse, Uses
from tenuto.session.postgres.replicas import Replicas
from tenuto.session.registry import Registry
from tenuto.session.session import Session

log = logging.getLogger("tenuto.fleet")

COUNTING = 0.02
"""The largest share of the time that is spent on counting sessions that no live replica owns."""
RETRY_SECONDS = 10.0
"""How long to wait before counting them again if the database could not be asked."""


class TenantCounts:
    """The use of tenants, summed for their limits: here, as other replicas report theirs, and of sessions that no
    replica owns.

    Invariant: each session or turn of a tenant is counted at one replica at most, as long as reports are less than a
    lease old. A session that has come from another replica is in that one's report for up to a lease. For that time,
    and until unowned sessions are counted again, it is not counted here (`_came`).
    """

    def __init__(self, lease: float, now: Callable[[], float]) -> None:
        self._lease = lease
        self._now = now
        self._lock = threading.Lock()  # held while the fields below are used
        self._others: Uses = {}  # reported by other live replicas with their last heartbeats
        self._unowned: Uses = {}  # of sessions that no live replica owned at `_counted`
        self._counted = now()
        self._due = now()  # when to count those again
        self._came: list[tuple[float, str, TenantUse]] = []  # sessions that have come, and when
        self._coming: dict[str, TenantUse] = {}  # their sums, by tenant

    def told(self, registry: Registry, turns: Uses) -> dict[str, TenantUse]:
        """Returns the use of tenants here, to be reported with a heartbeat. `turns`: the turns that the edge counts."""
        with self._lock:
            self._came = [each for each in self._came if each[0] > min(self._now() - self._lease, self._counted)]
            self._coming = {}
            for _, tenant, use in self._came:
                self._add(tenant, use)
            told: dict[str, TenantUse] = {}
            for name, use in turns.items():
                here = registry.counted(name)
                told[name] = use + (here - self._coming[name] if name in self._coming else here)
            return told

    def hear(self, registry: Registry, others: Uses) -> None:
        """Takes the reports of other live replicas, added up."""
        with self._lock:
            self._others = others
            self._update(registry, others)

    def count_unowned(self, replicas: Replicas, registry: Registry, tenants: Uses) -> None:
        """Counts, if it is time, the sessions of tenants that no live replica owns. The longer that takes, the less
        often it is done."""
        began = self._now()
        if not tenants or began < self._due:
            return
        try:
            unowned = replicas.unowned_of(tenants)
        except replicas.db.errors as error:
            log.warning("sessions without an owner cannot be counted: %s", error)
            self._due = began + RETRY_SECONDS
            return
        self._due = self._now() + (self._now() - began) / COUNTING
        with self._lock:
            self._unowned, self._counted = unowned, began
            self._update(registry, self._others)

    def came(self, registry: Registry, session: Session) -> None:
        """Notes a session that has come from another replica, or whose owner was gone."""
        tenant = session.policy.tenant
        with self._lock:
            if tenant in self._others:
                use = registry.counted_of(session)
                self._came.append((self._now(), tenant, use))
                self._add(tenant, use)
                self._update(registry, (tenant,))

    def _update(self, registry: Registry, tenants: Iterable[str]) -> None:
        changed: dict[str, TenantUse] = {}
        for name in tenants:
            use = self._others[name]
            if name in self._unowned:
                use += self._unowned[name]
            changed[name] = use - self._coming[name] if name in self._coming else use
        registry.elsewhere = {**registry.elsewhere, **changed}

    def _add(self, tenant: str, use: TenantUse) -> None:
        self._coming[tenant] = self._coming.get(tenant, TenantUse()) + use
