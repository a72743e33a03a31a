"""Worlds of replicas keep their promises, and notice planted faults."""

from __future__ import annotations

import psycopg
import pytest

from tenuto.base.errors import InvariantError, NotAcknowledged, SessionBusy, TenutoError
from tenuto.base.wire.fleet_messages import BeginMove, GiveUpSession
from tenuto.session.journal_rows import StoredSessions
from tenuto.session.records import SavedSession
from tests.sim.faults_of_fleets import FAULTS, Plant
from tests.sim.faults_of_shared_tiers import FAULTS as TIER_FAULTS
from tests.sim.fleet_replicas import asked_turn
from tests.sim.fleets import World, simulate
from tests.sim.violation import Violation


@pytest.mark.parametrize("seed", range(4))
def test_replicas_that_fail_sleep_and_lose_messages_keep_their_promises(seed: int) -> None:
    assert simulate(seed).operations > 10


@pytest.mark.parametrize("seed", range(2))
def test_replicas_that_also_give_sessions_up_keep_their_promises(seed: int) -> None:
    assert simulate(seed, gives_up=True).given_up > 0


@pytest.mark.parametrize("parked", [False, True])
def test_a_session_that_was_given_up_goes_on_with_its_saved_state(parked: bool) -> None:
    world = World(0)
    world.calm = True
    owner, other, _ = world.replicas
    owner.disk.budget = other.disk.budget = 10**6
    owner.engine.sessions.open("a")
    owner.start(asked_turn("a", 1, None, resumable=False))
    while not owner.engine.idle:
        owner.engine.step()
    owner.write()
    with pytest.raises(SessionBusy, match="not saved yet"):
        owner.moves.give_up(GiveUpSession(tenant="", session="a"))
    owner.rest()
    if parked:
        owner.engine.sessions.park("a")
    owner.moves.give_up(GiveUpSession(tenant="", session="a"))
    assert other.locate("a").url is None
    other.rest()
    assert other.taken_over == 1
    owner.engine.audit()
    world.close()


@pytest.mark.parametrize("changes", [False, True])
def test_a_session_is_read_again_while_its_owner_changes_only_if_it_has_changed(
    monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    reads: list[int] = []
    together = StoredSessions.together

    def noted(stored: StoredSessions, numbers: list[int]) -> list[SavedSession]:
        reads.extend(numbers)
        return together(stored, numbers)

    monkeypatch.setattr(StoredSessions, "together", noted)
    world = World(1)
    world.calm = True
    owner, other, _ = world.replicas
    session = owner.engine.sessions.open("a")

    def say(token: int) -> None:
        owner.start(asked_turn("a", token, None, resumable=False))
        while not owner.engine.idle:
            owner.engine.step()
        owner.write()

    say(1)
    offer = owner.moves.begin(BeginMove(tenant="", session="a", move="move"))
    other.reserve("move", offer)
    if changes:
        say(2)
    end = owner.moves.hold("move")
    other.moves.become("move", end, other.moves.prepare("move", end), lambda _: None)
    came = other.engine.registry.get("a")
    assert (came.version, came.history) == (session.version, session.history)
    assert came.epoch > session.epoch
    assert len(reads) == (2 if changes else 1)
    world.close()


def test_a_session_does_not_move_to_a_replica_that_cannot_ask_the_database() -> None:
    world = World(0)
    world.calm = True
    owner, other, _ = world.replicas
    owner.engine.sessions.open("a")
    owner.write()
    offer = owner.moves.begin(BeginMove(tenant="", session="a", move="move"))
    other.cut_off = True
    with pytest.raises(NotAcknowledged, match="cannot be asked"):
        other.moves.read(offer)
    world.close()


@pytest.mark.parametrize("seed", range(4))
def test_replicas_with_a_shared_tier_whose_store_fails_keep_their_promises(seed: int) -> None:
    assert simulate(seed, shared=True).operations > 10


def test_sessions_go_on_with_state_from_a_shared_tier() -> None:
    assert any(simulate(seed, shared=True).taken_over for seed in range(20))


def test_sessions_go_on_with_state_that_replicas_have_left() -> None:
    assert any(simulate(seed).taken_over for seed in range(20))


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_of_owners_or_leases_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((Violation, TenutoError, InvariantError)):
        simulate(FAULTS[plant])


@pytest.mark.parametrize("plant", TIER_FAULTS)
def test_a_planted_fault_of_a_shared_tier_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((Violation, TenutoError, InvariantError)):
        simulate(TIER_FAULTS[plant], shared=True)


def test_a_session_lost_by_a_jump_of_the_clock_is_dropped_once_the_database_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(0)
    world.calm = True
    owner, other, _ = world.replicas
    owner.engine.sessions.open("a")
    owner.write()
    world.jump(10)
    other.member.keep_lease()
    assert other.locate("a").url is None
    with monkeypatch.context() as broken:
        broken.setattr(owner.member._beats, "epochs", _fail)
        owner.member.keep_lease()
    assert owner.engine.registry.find("a") is not None
    owner.member.keep_lease()
    assert owner.engine.registry.find("a") is None
    assert owner.locate("a").url == f"http://{other.name}"
    world.close()


def _fail() -> None:
    raise psycopg.OperationalError("the answer is lost")
