"""Moves of sessions between the replicas of a simulated fleet; see `tests.sim.fleets`.

The replica that a session leaves carries out its part in steps, and what it asks the other one may be lost before or
after it is carried out, come late, or never be answered. Either replica may sleep or be killed between any two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec

from tenuto.base.errors import NotAcknowledged, TenutoError
from tenuto.base.turns import Delta
from tenuto.base.wire.fleet_messages import BeginMove, GiveUpSession, SettleMove
from tenuto.base.wire.moves import StateEnd, StateOffer, StatePiece
from tests.sim.fleet_clients import Clients, Known, Steps
from tests.sim.fleet_replicas import Replica

T = TypeVar("T")

LOST = 0.03
"""The probability that a message between replicas is lost before it is carried out, and that its answer is."""
PATIENCE = 6
"""How many steps the answer is waited for that says whether the owner was changed."""


class Lost(Exception):
    """A message to another replica, or its answer, is lost."""


class Mover(Clients):
    """Clients that also have sessions moved."""

    replicas: list[Replica]
    calm: bool
    running: list[tuple[Replica, Steps]]

    def _move(self, name: str, known: Known, replica: Replica) -> Steps:
        """Moves a session, often with an open turn, to another replica."""
        if not self._here(name, known, replica):
            return
        yield
        session = replica.engine.registry.get(name)
        if session.turn is None and self.rng.random() < 0.7 and not (yield from self._started(session, known, replica)):
            return
        if session.turn is not None:
            known.possible.add(session.turn.input[0])
        others = [each for each in self.replicas if each is not replica]
        ready = [each for each in others if each.wakes <= self.now and not (each.ended or each.cut_off)]
        other = self.rng.choice(ready if ready and self.rng.random() < 0.7 else others)
        move = f"move {next(self._inputs)}"
        offer = replica.moves.begin(BeginMove(tenant="", session=name, move=move))
        try:
            yield from self._copy(move, offer, replica, other)
        except (Lost, TenutoError):
            replica.moves.settle(SettleMove(move=move))
            return
        asked = gone = False
        try:
            end = replica.moves.hold(move)
            yield
            asked, answer = True, list[bool]()
            self.running.append((other, self._take(move, end, other, answer)))
            for _ in range(PATIENCE):
                yield
                if answer:
                    gone = answer[0] and self.rng.random() > LOST
                    break
        except TenutoError:
            pass
        yield from self._settle_move(SettleMove(move=move, gone=gone, asked=asked), replica)
        self.moves += gone

    def _give_up(self, name: str, known: Known, replica: Replica) -> Steps:
        """Has a session given up, with or without waiting for its saved state."""
        if not self._here(name, known, replica):
            return
        yield
        replica.moves.give_up(GiveUpSession(tenant="", session=name, unsaved=self.rng.random() < 0.3))
        self.given_up += 1

    def _settle_move(self, settle: SettleMove, replica: Replica) -> Steps:
        while True:
            try:
                replica.moves.settle(settle)
            except NotAcknowledged:
                yield
            else:
                return

    def _copy(self, move: str, offer: StateOffer, replica: Replica, other: Replica) -> Generator[None, None, None]:
        """Sends the state, while the session goes on. Raises `Lost`, and the other replica's refusals."""
        self._send(other, lambda: other.reserve(move, _sent(offer, StateOffer)))
        self.running.append((other, self._forgotten(move, other)))
        for _ in range(self.rng.randint(0, 3)):
            for piece in replica.moves.copy(move):
                yield
                self._send(other, lambda piece=piece: other.moves.put(move, _sent(piece, StatePiece)))  # type: ignore[misc]
            yield
            if self.rng.random() < 0.5:
                replica.engine.step()

    def _send(self, other: Replica, work: Callable[[], T]) -> T:
        """Lets another replica carry out a request. Raises `Lost`, and its refusals."""
        draw = 1.0 if self.calm else self.rng.random()
        if other.wakes > self.now or other.ended or other not in self.replicas or draw < LOST:
            raise Lost
        done = work()
        if draw < 2 * LOST:
            raise Lost
        return done

    def _take(self, move: str, end: StateEnd, other: Replica, answer: list[bool]) -> Steps:
        """Has the other replica become the owner, at some time. It answers if the one that asked still waits."""
        end, late = _sent(end, StateEnd), self.rng.choice((0, 0, 1, 3, 12))
        for _ in range(late // 2):
            yield
        try:
            readied = other.moves.prepare(move, end)
            for _ in range(late - late // 2):
                yield
            other.moves.become(move, end, readied, _ignored)
        except TenutoError:
            answer.append(False)
        else:
            answer.append(True)

    def _forgotten(self, move: str, other: Replica) -> Steps:
        """Has room given up of which nothing more is heard."""
        for _ in range(30):
            yield
        other.moves.drop(move)


def _sent(message: T, kind: type[T]) -> T:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def _ignored(_: Delta | TenutoError) -> None:
    """Receives what nobody reads."""
