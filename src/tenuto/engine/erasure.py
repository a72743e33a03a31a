"""Erasure of sessions: they are closed, and nothing of them is left in memory, tiers or the journal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import ClassVar

import msgspec
import numpy as np

from tenuto.base.plan import CopyFailed, Executor
from tenuto.base.turns import EndReason
from tenuto.base.views import Erased, SessionState, Sharing
from tenuto.engine.auditor import Auditor
from tenuto.engine.core import Core
from tenuto.engine.flights import Flights
from tenuto.engine.guard import guarded
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.occupation import Occupation
from tenuto.memory.pool import HolderKind, Lease, Pool
from tenuto.memory.tiers.erasing import erase_copies
from tenuto.memory.tiers.parked import StoredUnit
from tenuto.session.changes import ErasedRows
from tenuto.session.common import common_prefix
from tenuto.session.session import Session

PIECE = 2**22
"""The number of bytes that are overwritten at once."""

SWEPT_BYTES = 2**24
"""The number of bytes that `sweep` overwrites. That takes some milliseconds."""
SWEPT_SESSIONS = 32
"""The number of closed sessions whose memory it gives up."""

Units = list[set[int]]
"""Units by group."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receipt of an erasure; `rows` is complete once the journal has acknowledged it."""

    erased: Erased
    rows: ErasedRows

    def view(self) -> Erased:
        """Returns the receipt, with what was removed from the journal."""
        named = {other.session for other in self.erased.shared}
        none = dict.fromkeys(self.erased.held, 0)
        more = [
            Sharing(session=name, tokens=tokens, units=none, copies=0)
            for name, tokens in self.rows.shared.items()
            if name not in named
        ]
        shared = sorted([*self.erased.shared, *more], key=lambda other: other.session)
        return msgspec.structs.replace(self.erased, shared=shared, journal_rows=self.rows.rows)


class Erasure:
    """Erases sessions.

    Invariant: after an erasure, every free unit of the device that was ever used holds zeros. This covers what
    the session held, and what it had given back before. A unit that open sessions hold stays, and the receipt names
    them. Kept closed sessions yield. The auditor reads back what was overwritten.
    """

    holder_kind: ClassVar[HolderKind] = "erasure"
    holder_name = "an erasure"

    def __init__(
        self, core: Core, lifecycle: Lifecycle, occupation: Occupation, flights: Flights, auditor: Auditor
    ) -> None:
        self.fuse = core.fuse
        self._core = core
        self._lifecycle = lifecycle
        self._occupation = occupation
        self._flights = flights
        self._auditor = auditor

    def leases(self) -> list[Lease]:
        """Returns no leases: it holds units only within an operation."""
        return []

    @guarded
    def erase(self, session_id: str, *, tenant: str = "") -> Receipt:
        """Closes a session and overwrites what is left of it. Waits for the steps and copies under way. Raises
        `NotFound`."""
        core, session = self._core, self._core.registry.get(session_id, tenant)
        held = _units(session)
        if session.turn is not None:
            session.state = SessionState.OPEN  # otherwise the turn's end closes it
            self._lifecycle.abort(session.turn, EndReason.ABORT)
        self._stand_still()
        records = core.idle_memory.records(session)
        copies = erase_copies(core.idle_memory.tiers, core.idle_memory.saves, records, core.clock.now())
        rows = ErasedRows()
        if session.state is SessionState.OPEN:  # the end of its turn closes an ephemeral one, which no journal has
            rows = self._lifecycle.erase(session).erased
        for kept in [kept for kept in core.registry.prefixes if _shares(held, kept)]:
            self._lifecycle.drop(kept)
        shared = self._sharing(session, held, set(chain.from_iterable(records)))
        if core.proposer is not None:
            core.proposer.forget(tenant)
        overwritten = self._overwrite()
        tokens = session.wipe()
        failed = [*copies.failed, *self._left_over()]
        names = [pool.name for pool in core.memory.pools]
        erased = Erased(
            session=session_id,
            tokens=tokens,
            held=dict(zip(names, map(len, held), strict=True)),
            overwritten=overwritten,
            copies=copies.host,
            rows=copies.disk,
            shared=shared,
            failed=failed,
        )
        return Receipt(erased, rows)

    @guarded
    def sweep(self, session_id: str, *, tenant: str = "") -> bool:
        """Does a part of `erase_traces` that takes some milliseconds, and returns whether there is more that can be
        done in parts. Steps and copies go on. What becomes free meanwhile is left to `erase_traces`."""
        core = self._core
        if (tenant, session_id) not in core.registry.traces or self._occupation.released:
            return False
        kept = list(islice((each for each in core.registry.prefixes if each.policy.tenant == tenant), SWEPT_SESSIONS))
        for session in kept:
            self._lifecycle.drop(session)
        for pools, executor in self._memories():
            for group, pool in enumerate(pools):
                most = max(1, SWEPT_BYTES // max(1, executor.unit_bytes(group)))
                lease = pool.take_used(self, most)
                taken, count = len(lease), self._write_zeros(executor, group, lease)
                pool.overwritten(lease, count)
                if taken == most or count < taken:
                    return count == taken
        return bool(kept)

    @guarded
    def erase_traces(self, session_id: str, *, tenant: str = "") -> list[str]:
        """Overwrites what is left here of a session that has left for another replica, or was to come from one, and was
        erased there. Returns what could not be overwritten, and why. Waits for the steps and copies under way. Kept
        closed sessions of the tenant yield, since they may share units with it; open ones keep what they hold. Does
        nothing if the session was never here."""
        core, key = self._core, (tenant, session_id)
        if key not in core.registry.traces:
            return []
        self._stand_still()
        record = core.idle_memory.saves.record(key) if core.registry.find(session_id, tenant) is None else None
        records = [record] if record is not None else []
        copies = erase_copies(core.idle_memory.tiers, core.idle_memory.saves, records, core.clock.now())
        for kept in [kept for kept in core.registry.prefixes if kept.policy.tenant == tenant]:
            self._lifecycle.drop(kept)
        if core.proposer is not None:
            core.proposer.forget(tenant)
        self._overwrite()
        failed = [*copies.failed, *self._left_over()]
        if not failed:
            core.registry.traces.erased(key)
        return failed

    def _stand_still(self) -> None:
        """Ends the steps and copies under way, and what comes back early."""
        self._lifecycle.expectations.withdraw_all()
        self._flights.land()
        self._core.idle_memory.finish()
        self._core.idle_memory.saves.settle(self._core.clock.now())

    def _left_over(self) -> list[str]:
        """Says how many free units could not be overwritten, if there are any."""
        pools = (pool for pools, _ in self._memories() for pool in pools)
        left = sum(sum(pool.used[unit] for unit in pool.unused()[0]) for pool in pools)
        return [f"{left} free units on the device could not be overwritten"] if left else []

    def _sharing(self, session: Session, held: Units, stored: set[StoredUnit]) -> list[Sharing]:
        """Returns the open sessions that hold some of these units, or have copies of them."""
        copies = self._core.idle_memory.sharing(stored)
        found = []
        for other in self._core.registry:
            if other.scope != session.scope:
                continue
            units = [len(mine & its) for mine, its in zip(held, _units(other), strict=True)]
            if any(units) or copies[other.id]:
                names = (pool.name for pool in self._core.memory.pools)
                found.append(
                    Sharing(
                        session=other.id,
                        tokens=common_prefix(
                            session.history, other.history, min(map(len, (session.history, other.history)))
                        ),
                        units=dict(zip(names, units, strict=True)),
                        copies=copies[other.id],
                    )
                )
        return found

    def _memories(self) -> Iterable[tuple[Sequence[Pool], Executor]]:
        """Yields all pools on the device, by the executor that has their units."""
        core = self._core
        yield core.memory.pools, core.executor
        if core.proposer is not None:
            yield from core.proposer.memories()

    def _overwrite(self) -> dict[str, int]:
        """Overwrites the free units that were used. Returns their number by pool; those that cannot be overwritten stay
        `used`."""
        counts = {}
        for pools, executor in self._memories():
            for group, pool in enumerate(pools):
                lease = pool.take_used(self)
                count = len(lease) if self._occupation.released else self._write_zeros(executor, group, lease)
                pool.overwritten(lease, count)
                counts[pool.name] = count
        return counts

    def _write_zeros(self, executor: Executor, group: int, lease: Lease) -> int:
        """Overwrites the units of a lease, in order, and has the auditor read them. Returns their number."""
        size, done = executor.unit_bytes(group), 0
        together, zeros = max(1, PIECE // max(1, size)), np.zeros(size, np.uint8)
        while done < len(lease):
            units = np.array(lease.units[done : done + together], np.int32)
            try:
                executor.write_units(group, units, [zeros] * len(units))
                self._auditor.require_zeros(executor, lease.pool, group, units)
            except CopyFailed:
                break
            done += len(units)
        return done


def _units(session: Session) -> Units:
    """Returns the units that a session and its turn hold, by group."""
    found: dict[str, set[int]] = {table.pool.name: set() for table in session.memory.tables}
    for lease in _leases([session]):
        found[lease.pool.name].update(lease.units)
    return list(found.values())


def _leases(sessions: Iterable[Session]) -> Iterable[Lease]:
    return (lease for session in sessions for holder in session.memory.holders() for lease in holder.leases())


def _shares(held: Units, other: Session) -> bool:
    return any(mine & its for mine, its in zip(held, _units(other), strict=True))
