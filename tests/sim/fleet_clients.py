"""Operations of the clients of a simulated fleet, and what they know; see `tests.sim.fleets`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import psycopg

from tenuto.base.errors import AlreadyExists
from tenuto.base.wire.messages import StartTurn
from tenuto.session.session import Session
from tests.sim.fleet_replicas import LEASE, Replica, asked_turn
from tests.sim.violation import Violation

NAMES = ("a", "b", "c", "d")
MOST = 7
"""Sessions beyond which none is forked."""

Steps = Generator[None, None, None]
"""An operation of a client. Anything may happen between its steps."""


@dataclass
class Known:
    """What clients know of a session. `acknowledged`: the inputs of its acknowledged turns. `possible`: those of turns
    of which is unknown whether they are in the history. `ended`: those of all turns that were ever acknowledged.
    `begun`: the input of an acknowledged open turn. `asked`: key and input of a turn that is to be repeated until it is
    acknowledged. `answered`: those of the last such turn that was. `open`: `None` if that is unknown."""

    open: bool | None = None
    acknowledged: list[int] = field(default_factory=list)
    possible: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    begun: int | None = None
    asked: tuple[str, int] | None = None
    answered: tuple[str, int] | None = None
    busy: bool = False

    def learn(self, found: list[int]) -> None:
        """The history was acknowledged, while no turn was open."""
        self.acknowledged, self.possible, self.begun = found, set(), None
        self.ended |= {*found}
        if self.asked is not None and self.asked[1] in found:
            self.asked, self.answered = None, self.asked


class Clients:
    """Operations of clients, in steps. Each is carried out by the replica that the client, or a forwarding one, has
    asked. Checks what replicas answer."""

    def __init__(self, rng: Random, db: psycopg.Connection[Any]) -> None:
        self.rng = rng
        self.now = 0.0
        self.sessions = {name: Known() for name in NAMES}
        self._db = db
        self._jumped = -1e9  # when the database's clock did so last
        self._inputs = iter(range(1, 10**9))
        self.moves = self.given_up = 0

    def _here(self, name: str, known: Known, replica: Replica) -> bool:
        """Whether the replica says that it has the session."""
        place = replica.locate(name)
        if known.open and not place.exists:
            raise Violation(f"{name} is open, and said to be absent")
        if place.begun is not None:
            self._begin_again(name, known, replica, place.begun)
        return place.exists and place.url is None

    def _begin_again(self, name: str, known: Known, replica: Replica, request: bytes) -> None:
        """Begins a recorded turn again, as the edge does before it answers."""
        command = msgspec.msgpack.decode(request, type=StartTurn)
        given = int(command.name)
        if known.begun not in (None, given):
            raise Violation(f"{name}: another open turn is handed over")
        if given in known.ended:
            raise Violation(f"{name}: turn {given} is begun again after its commit")
        replica.start(command)

    def _open(self, name: str, known: Known, replica: Replica) -> Steps:
        if self._here(name, known, replica):
            yield
            if replica.acknowledges(replica.engine.registry.get(name)):
                known.open = True
            return
        yield
        known.open = None
        with suppress(AlreadyExists):
            session = replica.engine.sessions.open(name)
            yield
            if replica.acknowledges(session):
                known.open = True
                known.learn([])

    def _close(self, name: str, known: Known, replica: Replica) -> Steps:
        yield from self._end(name, known, replica, replica.engine.sessions.close)

    def _erase(self, name: str, known: Known, replica: Replica) -> Steps:
        yield from self._end(name, known, replica, replica.engine.erasure.erase)

    def _end(self, name: str, known: Known, replica: Replica, end: Callable[[str], object]) -> Steps:
        if not self._here(name, known, replica):
            return
        yield
        session = replica.engine.registry.get(name)
        del self.sessions[name]  # whether it has ended may never be known
        if len(self.sessions) < len(NAMES):
            self.sessions[f"session {next(self._inputs)}"] = Known()
        end(name)
        yield
        if (
            replica.acknowledges(session)
            and self._db.execute("SELECT 1 FROM sessions WHERE name = %s", (name,)).fetchone()
        ):
            raise Violation(f"{name} has ended, and is there")

    def _fork(self, name: str, known: Known, replica: Replica) -> Steps:
        if len(self.sessions) >= MOST or not self._here(name, known, replica):
            return
        yield
        found = inputs(replica.engine.registry.get(name))
        found = found[: self.rng.randint(0, len(found))]
        fork = f"session {next(self._inputs)}"
        child = self.sessions[fork] = Known(possible={*found}, busy=True)
        try:
            session = replica.engine.sessions.fork(name, turn=len(found), child=fork)
            yield
            if replica.acknowledges(session):
                child.open = True
                child.learn(found)
        finally:
            child.busy = False

    def _rewind(self, name: str, known: Known, replica: Replica) -> Steps:
        if not self._here(name, known, replica):
            return
        yield
        session = replica.engine.registry.get(name)
        found = inputs(session)
        if session.turn is not None or (known.begun is not None and known.begun not in found):
            return
        left = self.rng.randint(0, len(found))
        known.possible |= {*known.acknowledged[left:]}
        del known.acknowledged[left:]
        replica.engine.sessions.rewind(name, turn=left)
        yield
        if replica.acknowledges(session):
            self._require(name, known, found[:left])
            known.learn(found[:left])

    def _read(self, name: str, known: Known, replica: Replica) -> Steps:
        before = list(known.acknowledged)
        if not self._here(name, known, replica):
            return
        yield
        session = replica.engine.registry.get(name)
        found = inputs(session)
        if len(found) >= len(before):
            self._require(name, known, found)
        if self._is_current(session, replica) and found[: len(before)] != before:
            raise Violation(f"{name} has turns {before}, and {found} are shown")

    def _is_current(self, session: Session, replica: Replica) -> bool:
        """Whether a replica must show all of a session, of which it says that it is here."""
        return replica.acknowledges(session) and self._jumped < self.now - 2 * LEASE

    def _repeat(self, name: str, known: Known, replica: Replica) -> Steps:
        """Repeats a turn that was acknowledged, with its key."""
        if known.answered is None or not self._here(name, known, replica):
            return
        yield
        session = replica.engine.registry.get(name)
        key, given = known.answered
        kept = replica.find(name, key)
        if self._is_current(session, replica) and (kept is None or kept.name != str(given)):
            raise Violation(f"{name}: the result of {given} is lost")

    def _turn(self, name: str, known: Known, replica: Replica) -> Steps:
        if not self._here(name, known, replica):
            return
        yield
        session = replica.engine.registry.get(name)
        if session.turn is not None:  # begun again, or the client has gone and it continues
            known.possible.add(session.turn.input[0])
        elif not (yield from self._started(session, known, replica)):
            return
        yield
        if replica.engine.registry.get(name) is not session:
            return
        replica.play()
        yield
        found = inputs(session)
        if replica.acknowledges(session):
            self._require(name, known, found)
            known.learn(found)

    def _started(self, session: Session, known: Known, replica: Replica) -> Generator[None, None, bool]:
        """Starts a turn, unless it was carried out already. Returns whether the client goes on."""
        if known.begun is not None and known.begun not in inputs(session):
            raise Violation(f"{session.id}: the open turn {known.begun} is lost")
        given, key = next(self._inputs), None
        if known.asked is None and self.rng.random() < 0.5:
            known.asked = f"key {given}", given
        if known.asked is not None:
            key, given = known.asked
            if (kept := replica.find(session.id, key)) is not None:
                if kept.name != str(given):
                    raise Violation(f"{session.id}: {key} has the result of {kept.name}")
                return True
        known.possible.add(given)
        resumable = self.rng.random() < 0.5
        replica.start(asked_turn(session.id, given, key, resumable=resumable))
        if resumable:
            yield
            if not replica.acknowledges(session):
                return False
            known.begun = given
        return True

    def _require(self, name: str, known: Known, found: list[int]) -> None:
        """Checks a history that a commit or a claim has shown."""
        sure, rest = found[: len(known.acknowledged)], found[len(known.acknowledged) :]
        if sure != known.acknowledged or not {*rest} <= known.possible:
            raise Violation(f"{name} has turns {found}; acknowledged: {known.acknowledged}, possible: {known.possible}")
        if len({*found}) < len(found):
            raise Violation(f"{name} has turns {found}, one of them twice")


def inputs(session: Session) -> list[int]:
    """Returns the first token of each committed turn."""
    history: Any = session.history
    return [history[record.start] for record in session.records]
