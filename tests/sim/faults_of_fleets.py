"""Faults of owners and leases, planted one at a time: worlds of replicas (`tests.sim.fleets`) must fail with each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import msgspec
import pytest

from tenuto.base.fleet_views import TenantUse, Uses
from tenuto.base.plan import Bytes
from tenuto.base.views import SessionKey
from tenuto.base.wire.state_file import CopiedState
from tenuto.engine.departures import Departures, Rest
from tenuto.engine.engine import Engine
from tenuto.engine.moved_turns import Readied
from tenuto.engine.session_states import SessionStates
from tenuto.memory.tiers import left_state
from tenuto.memory.tiers.disk import Readable, UnitCopy
from tenuto.memory.tiers.left_state import Wanted
from tenuto.runtime.member import Member
from tenuto.runtime.moves import Moves
from tenuto.runtime.ownership import Ownership
from tenuto.runtime.replica_lease import ReplicaLease
from tenuto.runtime.tenant_counts import TenantCounts
from tenuto.session.changes import Change
from tenuto.session.journal_changes import ChangeTables
from tenuto.session.postgres.journal import PostgresJournal
from tenuto.session.postgres.replicas import Beat, Owned, ReadSession, Replicas
from tenuto.session.records import SavedSession
from tenuto.session.registry import Registry
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.sim.fleet_replicas import Replica
from tests.sim.fleets import simulate

Plant = Callable[[pytest.MonkeyPatch], None]


def commits_by_anyone(patch: pytest.MonkeyPatch) -> None:
    def owned(journal: PostgresJournal, session: Session) -> tuple[int, int] | None:
        query = "SELECT id, length FROM sessions WHERE tenant = ? AND name = ?"
        found = journal._db.execute(query, session.key).fetchone()
        return (found[0], found[1]) if found is not None else None

    patch.setattr(PostgresJournal, "_owned", owned)


def leases_that_never_end_here(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaLease, "holds", lambda _: True)


def lost_sessions_that_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "_drop_lost", lambda *_: None)


def claims_of_sessions_whose_owners_live(patch: pytest.MonkeyPatch) -> None:
    find = Replicas.find

    def found(replicas: Replicas, key: SessionKey) -> Owned | None:
        return replace(seen, live=False) if (seen := find(replicas, key)) is not None else None

    patch.setattr(Replicas, "find", found)
    patch.setattr(Replicas, "_lives", lambda *_: False)


def heartbeats_that_hide_claims(patch: pytest.MonkeyPatch) -> None:
    beat = Replicas.beat

    def hidden(replicas: Replicas, load: str, tenants: Uses) -> Beat | None:
        return replace(found, lost=False) if (found := beat(replicas, load, tenants)) is not None else None

    patch.setattr(Replicas, "beat", hidden)


def sessions_that_left_said_to_be_closed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Registry, "note_left", lambda *_: None)


def open_turns_that_are_not_handed_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replicas, "_begun", lambda *_: None)


def records_of_turns_that_outlive_them(patch: pytest.MonkeyPatch) -> None:
    def begun(replicas: Replicas, session: int, _: int) -> bytes | None:
        found = replicas.db.execute("SELECT request FROM begun WHERE session = ?", (session,)).fetchone()
        return bytes(found[0]) if found is not None else None

    note = PostgresJournal._note_begun

    def noted(journal: PostgresJournal, number: int, change: Change) -> None:
        if change.kind == "begin":
            note(journal, number, change)

    patch.setattr(Replicas, "_begun", begun)
    patch.setattr(PostgresJournal, "_note_begun", noted)


def results_that_others_do_not_get(patch: pytest.MonkeyPatch) -> None:
    claim = Replicas.claim

    def claimed(replicas: Replicas, key: SessionKey, seen: Owned) -> SavedSession | None:
        saved = claim(replicas, key, seen)
        return replace(saved, results=()) if saved is not None else None

    patch.setattr(Replicas, "claim", claimed)


def rewinds_that_are_not_written(patch: pytest.MonkeyPatch) -> None:
    write = ChangeTables.write

    def written(tables: ChangeTables, change: Change) -> None:
        if change.kind != "rewind":
            write(tables, change)

    patch.setattr(ChangeTables, "write", written)


def forks_without_their_parents_turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChangeTables, "_share", lambda *_: None)


def erasures_that_leave_results(patch: pytest.MonkeyPatch) -> None:
    def removed(tables: ChangeTables, session: int) -> None:
        tables._cut(session, 0)
        for table, column in (("records", "session"), ("sessions", "id")):
            tables._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (session,))

    patch.setattr(ChangeTables, "remove", removed)


def retries_that_are_written_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PostgresJournal, "_committed", lambda _: -1)


def moves_that_are_given_up_without_a_new_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ownership, "keep", lambda *_: True)


def sessions_that_move_in_any_epoch(patch: pytest.MonkeyPatch) -> None:
    def take(replicas: Replicas, key: SessionKey, owner: int, _: int, read: ReadSession | None) -> SavedSession | None:
        seen = replicas.find(key)
        return real(replicas, key, owner, seen.epoch, read) if seen is not None else None

    real = Replicas.take
    patch.setattr(Replicas, "take", take)


def sessions_that_are_moved_by_whoever_owns_them(patch: pytest.MonkeyPatch) -> None:
    def take(replicas: Replicas, key: SessionKey, _: int, __: int, read: ReadSession | None) -> SavedSession | None:
        if (seen := replicas.find(key)) is None or seen.owner is None:
            return None
        return real(replicas, key, seen.owner, seen.epoch, read)

    real = Replicas.take
    patch.setattr(Replicas, "take", take)


def sessions_that_come_as_they_were_read_before(patch: pytest.MonkeyPatch) -> None:
    def take(
        replicas: Replicas, key: SessionKey, owner: int, epoch: int, read: ReadSession | None
    ) -> SavedSession | None:
        saved = real(replicas, key, owner, epoch, None)
        return replace(read.saved, epoch=saved.epoch) if saved is not None and read is not None else saved

    real = Replicas.take
    patch.setattr(Replicas, "take", take)


def sessions_that_go_on_while_they_are_held(patch: pytest.MonkeyPatch) -> None:
    hold = Departures.hold

    def held(departures: Departures, move: str) -> Rest:
        rest = hold(departures, move)
        rest.session.held = False
        if rest.turn is not None:
            departures._lifecycle.go_on(rest.turn)
        return rest

    patch.setattr(Departures, "hold", held)


def sessions_that_move_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "execute", lambda replica, work, **_: replica.call(work))


def open_turns_that_stay_behind(patch: pytest.MonkeyPatch) -> None:
    hold = Departures.hold
    patch.setattr(Departures, "hold", lambda departures, move: replace(hold(departures, move), moved=None))


def open_turns_that_move_without_their_output(patch: pytest.MonkeyPatch) -> None:
    fill = Readied.fill

    def filled(readied: Readied, turn: Turn, now: float, weights: str) -> None:
        fill(readied, turn, now, weights)
        del turn.output[:-1]

    patch.setattr(Readied, "fill", filled)


def moved_sessions_that_stay_here_too(patch: pytest.MonkeyPatch) -> None:
    def leave(moves: Moves, engine: Engine, move: str, **_: bool) -> None:
        engine.departures.resume(move)

    patch.setattr(Moves, "_leave", leave)


def counts_that_others_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TenantCounts, "told", lambda _, __, turns: dict(turns))


def counts_of_replicas_that_have_ended(patch: pytest.MonkeyPatch) -> None:
    others = Replicas._others

    def heard(replicas: Replicas, tenants: Collection[str]) -> dict[str, TenantUse]:
        found = others(replicas, tenants)
        for (told,) in replicas.db.execute("SELECT tenants FROM replicas WHERE ended AND tenants IS NOT NULL"):
            for tenant, use in msgspec.json.decode(told, type=dict[str, TenantUse]).items():
                found[tenant] += use
        return found

    patch.setattr(Replicas, "_others", heard)


def sessions_without_an_owner_that_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replicas, "unowned_of", lambda *_: {})


def sessions_that_count_twice_when_they_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TenantCounts, "came", lambda *_: None)


def sessions_that_came_and_never_count(patch: pytest.MonkeyPatch) -> None:
    came = TenantCounts.came

    def come(counts: TenantCounts, registry: Registry, session: Session) -> None:
        counts._lease = 1e9
        came(counts, registry, session)

    patch.setattr(TenantCounts, "came", come)


def saved_state_that_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    def read(files: Readable, copies: Sequence[UnitCopy]) -> list[Bytes]:
        group, file = copies[0].place
        assert file is not None
        return [unit.data for unit in files.read(file, {group: [copy.row for copy in copies]})[group]]

    patch.setattr(left_state, "read_units", read)


def saved_state_for_sessions_that_have_gone_on(patch: pytest.MonkeyPatch) -> None:
    def take(states: SessionStates, session: Session, _: Wanted, state: CopiedState) -> bool:
        return states._idle_memory.hold(session, state)

    patch.setattr(SessionStates, "take", take)


FAULTS: dict[Plant, int] = {
    commits_by_anyone: 16,
    leases_that_never_end_here: 6,
    lost_sessions_that_stay: 0,
    claims_of_sessions_whose_owners_live: 0,
    heartbeats_that_hide_claims: 115,
    sessions_that_left_said_to_be_closed: 29,
    open_turns_that_are_not_handed_over: 1,
    records_of_turns_that_outlive_them: 0,
    results_that_others_do_not_get: 7,
    rewinds_that_are_not_written: 4,
    forks_without_their_parents_turns: 0,
    erasures_that_leave_results: 0,
    retries_that_are_written_again: 11,
    moves_that_are_given_up_without_a_new_epoch: 2,
    sessions_that_move_in_any_epoch: 65,
    sessions_that_are_moved_by_whoever_owns_them: 38,
    sessions_that_come_as_they_were_read_before: 4,
    sessions_that_go_on_while_they_are_held: 48,
    sessions_that_move_before_they_are_written: 167,
    open_turns_that_stay_behind: 2,
    open_turns_that_move_without_their_output: 7,
    moved_sessions_that_stay_here_too: 0,
    counts_that_others_are_not_told: 0,
    counts_of_replicas_that_have_ended: 0,
    sessions_without_an_owner_that_do_not_count: 6,
    sessions_that_count_twice_when_they_come: 6,
    sessions_that_came_and_never_count: 0,
    saved_state_that_is_not_compared: 3,
    saved_state_for_sessions_that_have_gone_on: 33,
}
"""The faults, each with a world that fails with it. `python -m tests.sim.faults_of_fleets` looks for such worlds."""


def find(plant: Plant, most: int, *, shared: bool = False) -> int | None:
    """Returns the first of `most` worlds that fails with a fault. `shared`: see `simulate`."""
    for seed in range(most):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            try:
                simulate(seed, shared=shared)
            except Exception:  # noqa: BLE001 - whatever a fault causes
                return seed
    return None


def look(faults: Iterable[Plant], most: int, *, shared: bool = False) -> None:
    """Prints a world for each fault."""
    logging.getLogger("tenuto.fleet").setLevel(logging.CRITICAL)
    for plant in faults:
        print(plant.__name__, find(plant, most, shared=shared), flush=True)


if __name__ == "__main__":
    look(FAULTS, 150)
