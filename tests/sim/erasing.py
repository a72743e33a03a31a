"""Sessions that are erased: nothing of them may be left in memory, on the disk or in the journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tenuto.base.views import Erased
from tenuto.engine.erasure import Receipt
from tenuto.engine.parking import Parking
from tenuto.exec.witness import WitnessExecutor
from tenuto.memory.tiers.parked import StoredUnit
from tenuto.session.session import Session

if TYPE_CHECKING:
    from tests.sim.actions import RandomWorld
    from tests.sim.mirror import MirroredWorld
    from tests.sim.world import World


def erase_some(world: RandomWorld) -> None:
    """Erases a session: any, or one that shares memory with another."""
    shared = world.rng.random() < 0.5
    found = [s.id for s in world.engine.registry if not shared or _shares(s)]
    if found:
        erase(world, world.rng.choice(found))


def erase(world: MirroredWorld, sid: str) -> None:
    session = world.session_of(sid)
    turn = session.turn
    held, history = _units(session), session.history[:]
    at_rest = [unit for unit in _stored(world.engine.idle_memory, session) if unit.file is None and not unit.leaving]
    copies = [(unit, unit.data) for unit in at_rest if unit.data is not None]
    if session.policy.lasting:
        world.journal.erased[session] = history.tobytes()
    receipt: Receipt | None = world.attempt(
        "erase", set(), lambda: world.engine.erasure.erase(sid, **world.own(sid)), sid
    )
    if turn is not None:
        world.turns.pop(turn.number)
        if turn.result is None or turn.result.committed:
            world.found("ends", f"{turn!r} was not rolled back when its session was erased")
    world.naive.pop(sid, None)
    _land(world)
    if world.is_open(sid) or receipt is None:
        world.found("ends", f"{sid} is still open after being erased")
        return
    if any(session.history) or session.records:
        world.found("erased", f"{sid} still has its tokens")
    if receipt.erased.tokens != len(history):
        world.found("erased", f"{sid} had {len(history)} tokens, and its receipt has {receipt.erased.tokens}")
    if any(data.any() for unit, data in copies if not unit.references):
        world.found("erased", f"host memory still has a copy of a unit of {sid}")
    _check_device(world, receipt.erased)
    _check_disk(world, receipt.erased)
    _check_shared(world, receipt.erased, held)


def _land(world: World) -> None:
    """Takes note of the steps that an erasure has collected."""
    for each in world.engine.outcomes.take_ended():
        if each.number in world.turns:
            world.ended(each)
    for session in world.engine.registry:
        if session.turn is not None and session.turn.number in world.turns:
            world.followed(session.turn)


def _check_device(world: World, receipt: Erased) -> None:
    """Checks that every free unit that was used holds zeros, or was said not to."""
    for pools, executor in world.engine.erasure._memories():
        assert isinstance(executor, WitnessExecutor)
        for group, pool in enumerate(pools):
            free, limbo = pool.unused()
            if limbo:
                world.found("erased", f"{pool.name}: units {limbo} are in limbo, and were not overwritten")
            size = executor._slots_of(group)
            for unit in free:
                if pool.used[unit] and not (receipt.failed and world.config.copy_fail_rate):
                    world.found("erased", f"{pool.name}: free unit {unit} was not overwritten")
                if pool.generation[unit] and not pool.used[unit]:
                    slots = slice(unit * size, (unit + 1) * size)
                    if any(np.any(stored[slots]) for stored in executor._slots[group]):
                        world.found("erased", f"{pool.name}: free unit {unit} holds something")
    if world.engine.core.proposer is not None and any(world.engine.core.proposer.holders()):
        world.found("erased", "the draft model still follows sessions")


def _check_disk(world: World, receipt: Erased) -> None:
    """Checks that every unit on disk is one that some session still needs."""
    tiers = world.engine.idle_memory.tiers
    if any("removed" in failure for failure in receipt.failed):
        world.found("erased", f"files are left: {receipt.failed}")
    if world.disk is None or receipt.failed or any(record.unread for record in tiers._on_disk):
        return
    if world.disk.index.log_holds:
        world.found("erased", "the log of the index still has an erased session")
    known = {(file.name, group, row) for file, rows in tiers.copies.rows(()).items() for group, row in rows}
    if (there := set(world.disk.holding())) != known:
        world.found("erased", f"the disk still has {sorted(there - known)}, and has lost {sorted(known - there)}")


def _check_shared(world: World, receipt: Erased, held: list[set[int]]) -> None:
    """Checks that the receipt names every session that still has units of the erased one, and that no closed one
    has."""
    told = {other.session: list(other.units.values()) for other in receipt.shared}
    for other in world.engine.registry:
        units = [len(mine & its) for mine, its in zip(held, _units(other), strict=True)]
        if units != told.get(other.id, [0] * len(units)):
            world.found("erased", f"{other.id} shares {units} units, and the receipt says {told.get(other.id)}")
    for kept in world.engine.registry.prefixes:
        if any(mine & its for mine, its in zip(held, _units(kept), strict=True)):
            world.found("erased", f"{kept!r} is closed and keeps units of an erased session")


def _units(session: Session) -> list[set[int]]:
    found: dict[str, set[int]] = {table.pool.name: set() for table in session.memory.tables}
    for holder in session.memory.holders():
        for lease in holder.leases():
            found[lease.pool.name].update(lease.units)
    return list(found.values())


def _shares(session: Session) -> bool:
    return any(
        table.pool.counts[unit] > 1
        for table, units in zip(session.memory.tables, _units(session), strict=True)
        for unit in units
    )


def _stored(parking: Parking, session: Session) -> list[StoredUnit]:
    records = parking._sessions.get(session), parking.saves.record(session.key)
    return [unit for record in records if record is not None and not record.unread for unit in record]
