"""A session moves to another engine at any moment: with its state, and its open turn goes on there as if nothing had
happened. Until it has left, it can go on where it was."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from tenuto.base.errors import AdapterBusy, InvalidRequest, Misdirected, NoRoom, NotFound, Overloaded, SessionBusy
from tenuto.base.options import SessionAdapter, TurnParams
from tenuto.base.turns import TurnState
from tenuto.base.wire.moves import StateEnd, StateOffer, StatePiece
from tenuto.engine import erasure
from tenuto.engine.departures import Rest
from tenuto.memory.tiers.lent import LentUnits
from tenuto.memory.tiers.unit_files import SUFFIX
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.engine.stage import (
    FULL,
    PAGE,
    SLIDING,
    STATE,
    STATES,
    Stage,
    continuation,
    count_from,
    every_mix,
    every_overlap,
)
from tests.engine.test_adapters import load
from tests.engine.test_snapshots import begin, goes_on

IDENTITY = "weights"


def sent(message: Any, kind: Any) -> Any:
    """Returns a message as the other replica gets it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def used_and_free(stage: Stage) -> int:
    """Returns the number of free units that were used since they were last overwritten."""
    return sum(sum(pool.used[unit] for unit in pool.unused()[0]) for pool in stage.engine.pools)


def summed(stage: Stage, pieces: list[StatePiece]) -> list[StatePiece]:
    return [piece.summed(stage.engine.departures.unit_bytes[piece.group]) for piece in pieces]


class Move:
    """A move of the session "s" from one engine to another, step by step."""

    def __init__(self, here: Stage, there: Stage) -> None:
        self.here, self.there = here, there
        offer = msgspec.structs.replace(here.engine.departures.begin("m", "s"), identity=IDENTITY)
        there.engine.arrivals.reserve("m", sent(offer, StateOffer))

    def copy(self, most: int = 64) -> bool:
        """Copies some settled units; returns whether there were any."""
        pieces = summed(self.here, self.here.engine.departures.copy("m", most))
        for piece in pieces:
            self.there.engine.arrivals.put("m", sent(piece, StatePiece))
        return bool(pieces)

    def hold(self) -> StateEnd:
        rest = self.here.engine.departures.hold("m")
        pieces, position, units = rest.pieces, rest.position, rest.units
        if isinstance(rest.lent, LentUnits):
            state = rest.lent.read()
            self.here.engine.states.take_back(rest.lent)
            position, units = state.position, [len(group) for group in state.groups]
            pieces = [StatePiece.of(g, 0, np.stack(units)) for g, units in enumerate(state.groups) if units]
        self.here.engine.audit()
        return self._end(rest, position, units, summed(self.here, pieces))

    def _end(self, rest: Rest, position: int, units: list[int], pieces: list[StatePiece]) -> StateEnd:
        end = StateEnd(
            identity=IDENTITY, epoch=1, position=position, units=units, kept=rest.kept, pieces=pieces, turn=rest.moved
        )
        found: StateEnd = sent(end, StateEnd)
        return found

    def give(self, end: StateEnd, *, completed: bool = False) -> Turn | None:
        """`completed`: the other engine has the state already."""
        there, session = self.there.engine, self.here.engine.registry.find("s")
        assert session is not None
        saved = session.saved()
        if not completed:
            there.arrivals.complete("m", end)
        readied = there.turns.ready(end.turn, None) if end.turn is not None else None
        there.arrivals.let_in("m")
        arrived = there.sessions.restore(saved, journaled=True)
        there.arrivals.give("m", arrived, end.position)
        turn = there.turns.go_on(arrived, readied, arrived.memory.computed) if readied is not None else None
        there.audit()
        left = self.here.engine.departures.forget("m")
        assert left is session
        self.here.engine.sessions.leave(session)
        self.here.engine.audit()
        return turn


def free(stage: Stage) -> bool:
    return all(pool.free == pool.capacity for pool in stage.engine.memory.pools)


@every_mix
@every_overlap
@pytest.mark.parametrize("state", STATES)
def test_an_open_turn_goes_on_in_another_engine(mix: Any, overlap: int, state: str) -> None:
    here, there = Stage(mix, overlap=overlap), Stage(mix, overlap=overlap)
    history = list(here.committed().history)
    before = here.reach(state)
    move = Move(here, there)
    while move.copy(10**6):
        here.step()
    end = move.hold()
    given = list(before.output)
    turn = move.give(end)
    assert free(here)
    if state == "drafting":
        assert turn is None
        turn = there.say("s", count_from(600, 20), 20)
    assert turn is not None
    there.play()
    there.engine.audit()
    assert list(turn.output) == continuation([*history, *count_from(600, 20)], 20)
    assert list(turn.output[: len(given)]) == given
    again = there.say("s", [5], 3)
    there.play()
    whole = [*history, *count_from(600, 20), *turn.output]
    assert list(again.output) == continuation([*whole, 5], 3)
    assert again.result is not None
    assert again.result.usage.cached == len(whole) - 1


@every_mix
@every_overlap
def test_a_running_turn_computes_nothing_again_after_its_move(mix: Any, overlap: int) -> None:
    here, there = Stage(mix, overlap=overlap), Stage(mix, overlap=overlap)
    here.committed()
    before = here.reach("mid-decode", output=40)
    move = Move(here, there)
    while move.copy(10**6):
        here.step()
    end = move.hold()
    left = 40 - len(before.output)
    assert there.cost(lambda: move.give(end)) == left


class Journey:
    """A session that moves again and again, while its turns begin, end and are aborted. `seed` decides everything."""

    def __init__(self, mix: Any, seed: int) -> None:
        self.rng = Random(seed)
        self._mix = mix
        self._right = self.rng.random() < 0.5
        tier, units = self.rng.choice((0, 10**6)), self.rng.choice((60, 300))
        self._options: dict[str, Any] = {"overlap": self.rng.randint(0, 1), "host_tier": tier, "units": units}
        if self.rng.random() < 0.4:
            self._options |= {"lookahead": 3, "guess": self._guess}
        self.here = Stage(mix, **self._options)
        self.here.committed(tokens=self.rng.randint(1, 40))

    def _guess(self, turn: Turn, limit: int) -> list[int]:
        tokens = continuation(list(turn.tokens(0, turn.length)), limit) if self._right else [1] * limit
        return tokens[: self.rng.randint(0, limit)]

    @property
    def session(self) -> Session:
        return self.here.engine.registry.get("s")

    def move(self) -> Turn | None:
        """Moves the session; returns its open turn, if it has one."""
        there = Stage(self._mix, **self._options)
        turn = self._begin()
        move = Move(self.here, there)
        self._meanwhile(move, turn)
        if self.rng.random() < 0.3:
            move.hold()
            there.engine.arrivals.drop("m")
            self.here.engine.departures.resume("m")
            self.here.engine.audit()
            self._steps(5)
            move = Move(self.here, there)
        moved = move.give(move.hold())
        assert free(self.here)
        self.here = there
        return moved

    def _begin(self) -> Turn | None:
        kind, given = self.rng.choice(("idle", "parked", "turn", "turn", "turn", "again", "queued")), self._input()
        if kind == "parked":
            self.here.engine.pressure.drop(self.session)
        turn: Turn | None = None
        if kind in ("turn", "queued"):
            turn = self.here.say("s", given, self.rng.choice((1, 9, 30)))
        elif kind == "again" and self.session.records:
            turn = self.here.engine.turns.regenerate("s", TurnParams(max_new_tokens=12))
        if kind != "queued":
            self._steps(12)
        return turn

    def _input(self) -> list[int]:
        return count_from(self.rng.randint(1, 99), self.rng.randint(1, 30))

    def _steps(self, most: int) -> None:
        for _ in range(self.rng.randint(0, most)):
            self.here.step()

    def _meanwhile(self, move: Move, turn: Turn | None) -> None:
        for _ in range(self.rng.randint(0, 12)):
            if self.rng.random() < 0.6:
                move.copy(self.rng.choice((1, 64, 10**6)))
            if self.rng.random() < 0.6:
                self.here.step()
            if turn is not None and turn.running and self.rng.random() < 0.1:
                self.here.engine.pressure.preempt(turn)
            if turn is not None and not turn.state.ended and self.rng.random() < 0.05:
                self.here.engine.turns.abort("s", self.rng.choice((None, "all", 2)))

    def end(self, turn: Turn) -> None:
        """Ends a moved turn in some way, and checks its output."""
        base, engine = list(self.session.history[: turn.base_length]), self.here.engine
        self._steps(5)
        kind = self.rng.choice(("plays", "plays", "abort", "barge-in", "preempt"))
        if turn.state.ended:
            kind = "ended"
        if kind == "abort":
            engine.turns.abort("s")
        elif kind == "barge-in":
            engine.turns.abort("s", self.rng.choice((0, 1, len(turn.output), "all")))
        elif kind == "preempt" and turn.running:
            engine.pressure.preempt(turn)
        engine.audit()
        self.here.play()
        assert list(turn.output) == continuation([*base, *turn.input], len(turn.output))

    def goes_on(self) -> None:
        """Checks that the next turn follows from what is committed."""
        history, given = list(self.session.history), self._input()
        turn = self.here.say("s", given, 3)
        self.here.play()
        self.here.engine.audit()
        assert list(turn.output) == continuation([*history, *given], 3)


@every_mix
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_before_and_after_a_move_every_token_is_right(mix: Any, seed: int) -> None:
    journey = Journey(mix, seed)
    for _ in range(3):
        if (turn := journey.move()) is not None:
            journey.end(turn)
        if len(journey.session.history) < 100:
            journey.goes_on()
    journey.here.engine.sessions.close("s")
    assert free(journey.here)


@every_mix
def test_a_held_session_is_found_by_nothing_and_goes_on_where_it_stood(mix: Any) -> None:
    here, there = Stage(mix), Stage(mix)
    history = list(here.committed().history)
    turn = here.reach("mid-decode")
    move = Move(here, there)
    move.hold()
    output = list(turn.output)
    for _ in range(5):
        here.step()
    assert list(turn.output) == output
    for operation in (
        lambda: here.engine.turns.abort("s"),
        lambda: here.engine.sessions.close("s"),
        lambda: here.engine.sessions.fork("s"),
        lambda: here.engine.departures.begin("another", "s"),
    ):
        with pytest.raises(Misdirected):
            operation()
    here.engine.departures.resume("m")
    there.engine.arrivals.drop("m")
    assert free(there)
    assert here.cost(lambda: None) == 20 - len(output)
    assert list(turn.output) == continuation([*history, *count_from(600, 20)], 20)


def test_a_deadline_ends_no_turn_that_is_held_but_ends_it_when_it_goes_on() -> None:
    here = Stage()
    here.committed()
    turn = here.say("s", [1], 100, timeout=5)
    here.step()
    here.engine.departures.begin("m", "s")
    here.engine.departures.hold("m")
    here.clock.advance(6)
    here.step()
    assert not turn.state.ended
    here.engine.departures.resume("m")
    here.step()
    assert turn.state is TurnState.ABORTED


def test_the_time_of_a_deadline_goes_on_in_the_other_engine() -> None:
    here, there = Stage(), Stage()
    here.committed()
    here.say("s", [1], 100, timeout=5)
    here.step()
    move = Move(here, there)
    here.clock.advance(3)
    turn = move.give(move.hold())
    assert turn is not None
    there.clock.advance(1)
    there.step()
    assert not turn.state.ended
    there.clock.advance(1.5)
    there.step()
    assert turn.state is TurnState.ABORTED


def test_pages_that_were_written_again_are_sent_again() -> None:
    here, there = Stage((FULL,)), Stage((FULL,))
    here.committed(tokens=30)
    move = Move(here, there)
    while move.copy():
        pass
    here.engine.sessions.rewind("s", position=5)
    turn = here.say("s", count_from(9, 40), 5)
    here.play()
    history = list(here.engine.registry.get("s").history)
    assert turn.result is not None
    end = move.hold()
    assert end.kept == [1]
    move.give(end)
    again = there.say("s", [3], 4)
    there.play()
    assert list(again.output) == continuation([*history, 3], 4)


def test_a_session_without_room_on_the_device_goes_to_the_tiers() -> None:
    here, there = Stage((FULL, STATE)), Stage((FULL, STATE), units=(12, 40), host_tier=10**6)
    history = list(here.committed(tokens=20).history)
    there.open("busy")
    there.say("busy", count_from(1, 24), 20)
    there.until(lambda: len(there.engine.batch))
    move = Move(here, there)
    while move.copy():
        pass
    move.give(move.hold())
    there.play()
    turn = there.say("s", [3], 4)
    there.play()
    assert list(turn.output) == continuation([*history, 3], 4)
    assert turn.result is not None
    assert turn.result.usage.cached == len(history) - 1


def test_an_open_turn_without_room_is_refused_and_room_yields_to_turns() -> None:
    here, there = Stage(), Stage(units=30)
    here.committed(tokens=20)
    here.reach("mid-decode")
    there.open("busy")
    busy = there.say("busy", count_from(1, 80), 20)
    there.until(lambda: busy.output)
    with pytest.raises(NoRoom):
        Move(here, there)
    here.engine.departures.resume("m")
    there.play()
    there.engine.sessions.rewind("busy", position=1)
    move = Move(here, there)
    there.say("busy", count_from(1, 100), 2)  # needs the room
    there.play()
    with pytest.raises(NotFound):
        there.engine.arrivals.complete("m", move.hold())
    here.engine.departures.resume("m")
    assert here.cost(lambda: None) > 0


def test_a_session_whose_state_has_grown_beyond_the_room_stays_where_it_is() -> None:
    here, there = Stage(), Stage(units=30)
    here.committed(tokens=20)
    turn = here.reach("mid-decode", output=60)
    there.open("idle")
    there.say("idle", count_from(1, 56), 4)
    there.play()
    move = Move(here, there)
    grown = len(turn.output) + 20
    here.until(lambda: len(turn.output) >= grown or turn.result is not None)
    with pytest.raises(NotFound):
        there.engine.arrivals.complete("m", move.hold())
    here.engine.departures.resume("m")
    here.play()
    there.engine.audit()


def test_the_last_place_is_kept_for_a_session_until_it_is_there() -> None:
    here, there = Stage(), Stage(max_sessions=2)
    history = list(here.committed().history)
    there.open("first")
    here.reach("mid-decode")
    move = Move(here, there)
    with pytest.raises(Overloaded, match="2 sessions are open"):
        there.open("second")
    turn = move.give(move.hold())
    assert turn is not None
    there.play()
    assert list(turn.output) == continuation([*history, *count_from(600, 20)], 20)
    there.engine.sessions.close("first")
    there.open("second")
    assert there.engine.registry.coming == 0


def test_what_a_pinned_session_needs_is_kept_for_it_until_it_is_there() -> None:
    here, there = Stage(), Stage(units=80)
    here.committed(pinned=True, max_tokens=80)
    there.open("pinned", pinned=True, max_tokens=80)
    with pytest.raises(Overloaded, match="pinned sessions would take"):
        Move(here, there)
    here.engine.departures.resume("m")
    assert there.engine.registry.coming == 0
    there.engine.sessions.close("pinned")
    move = Move(here, there)
    with pytest.raises(Overloaded, match="pinned sessions would take"):
        there.open("pinned", pinned=True, max_tokens=80)
    move.give(move.hold())
    assert there.engine.registry.get("s").policy.pinned
    there.engine.sessions.close("s")
    there.open("pinned", pinned=True, max_tokens=80)


def test_an_adapter_stays_loaded_while_a_session_with_it_moves_here() -> None:
    here, there = Stage(), Stage()
    for stage in (here, there):
        load(stage, "a")
    history = list(here.committed(adapter=SessionAdapter("a")).history)
    here.reach("mid-decode")
    move = Move(here, there)
    with pytest.raises(AdapterBusy, match="move here is 1"):
        there.engine.adapters.unload("a")
    turn = move.give(move.hold())
    with pytest.raises(AdapterBusy, match="open turns"):
        there.engine.adapters.unload("a")
    there.play()
    assert turn is not None
    assert list(there.engine.registry.get("s").history)[: len(history)] == history
    there.engine.adapters.unload("a")


def test_complete_state_yields_to_turns_but_the_session_keeps_its_place() -> None:
    here, there = Stage(), Stage(units=30, max_sessions=2)
    history = list(here.committed(tokens=20).history)
    here.reach("mid-decode")
    there.open("busy")
    move = Move(here, there)
    end = move.hold()
    there.engine.arrivals.complete("m", end)
    there.say("busy", count_from(1, 100), 2)  # needs the room
    there.play()
    with pytest.raises(Overloaded):
        there.open("second")
    turn = move.give(end, completed=True)
    there.play()
    assert turn is not None
    assert list(turn.output) == continuation([*history, *count_from(600, 20)], 20)


def test_damaged_units_and_other_layouts_are_refused() -> None:
    here, there = Stage(), Stage()
    here.committed()
    move = Move(here, there)
    (piece,) = summed(here, here.engine.departures.copy("m", 10**6))
    flipped = memoryview(bytes(piece.data[:-1]) + bytes([piece.data[-1] ^ 1]))
    for damaged in (
        StatePiece(piece.group, piece.first, flipped, piece.checksums),
        StatePiece(piece.group, piece.first, piece.data[:-8], piece.checksums),
        StatePiece(piece.group, piece.first, piece.data, piece.checksums[:-1]),
        StatePiece(piece.group, piece.first + 1, piece.data, piece.checksums),
        StatePiece(7, piece.first, piece.data, piece.checksums),
    ):
        with pytest.raises(InvalidRequest):
            there.engine.arrivals.put("m", damaged)
    end = move.hold()  # its first pages never arrived
    with pytest.raises(InvalidRequest):
        there.engine.arrivals.complete("m", end)
    other = Stage(page_size=PAGE + 1)
    with pytest.raises(InvalidRequest):
        other.engine.arrivals.reserve("m", move.there.engine.arrivals._arrivals["m"].offer)


def test_a_turn_that_scores_its_input_is_waited_for() -> None:
    here = Stage()
    here.open()
    here.say("s", count_from(1, 60), 4, input_logprobs=0)
    here.step()
    here.engine.departures.begin("m", "s")
    with pytest.raises(SessionBusy, match="moving already"):
        here.engine.departures.begin("n", "s")
    with pytest.raises(SessionBusy, match="scores"):
        here.engine.departures.hold("m")
    here.play()
    assert here.engine.departures.hold("m").moved is None


def test_state_of_other_weights_is_not_sent() -> None:
    here, there = Stage((FULL, SLIDING)), Stage((FULL, SLIDING))
    history = list(here.committed().history)
    session: Session = here.engine.registry.get("s")
    here.engine.occupation.update(here.executor.load("other"), "other", keep_state=True)
    move = Move(here, there)
    end = move.hold()
    assert (end.position, end.pieces) == (0, [])
    assert not session.memory.is_current
    move.give(end)
    turn = there.say("s", [3], 4)
    there.play()
    assert list(turn.output) == continuation([*history, 3], 4)


@every_mix
def test_what_an_erased_session_has_left_where_it_was_before_is_overwritten(mix: Any, tmp_path: Path) -> None:
    here, there = begin(tmp_path, mix, checkpoint_rate=10**9), Stage(mix)
    here.committed("stays", 40)
    here.committed(tokens=50)
    for _ in range(20):
        here.step()
    move = Move(here, there)
    move.give(move.hold())
    assert any(pool.used[unit] for pool in here.engine.pools for unit in pool.unused()[0])
    assert here.engine.erasure.erase_traces("another") == []
    assert any(pool.used[unit] for pool in here.engine.pools for unit in pool.unused()[0])
    assert here.engine.erasure.erase_traces("s") == []
    assert not any(pool.used[unit] for pool in here.engine.pools for unit in pool.unused()[0])
    here.engine.audit()
    assert goes_on(here, "stays", 5) == 45


@every_mix
def test_traces_are_swept_in_parts_between_which_turns_go_on(mix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure, "SWEPT_BYTES", 1)
    monkeypatch.setattr(erasure, "SWEPT_SESSIONS", 1)
    here, there = Stage(mix, prefix_cache=True), Stage(mix)
    history = list(here.committed("stays", 40).history)
    for closed in "ab":
        here.committed(closed, 20)
        here.engine.sessions.close(closed)
    here.committed(tokens=50)
    move = Move(here, there)
    move.give(move.hold())
    assert here.engine.registry.prefixes
    assert not here.engine.erasure.sweep("another")
    turn, parts = here.say("stays", [3], 40), 0
    before = used_and_free(here)
    while here.engine.erasure.sweep("s"):
        assert used_and_free(here) >= before - 1
        here.engine.audit()
        here.step()
        before, parts = used_and_free(here), parts + 1
    assert parts > 0
    assert used_and_free(here) == 0
    assert not here.engine.registry.prefixes
    here.play()
    assert list(turn.output) == continuation([*history, 3], 40)
    assert here.engine.erasure.erase_traces("s") == []
    assert used_and_free(here) == 0


def test_rows_of_an_erased_session_in_files_that_others_need_are_overwritten(tmp_path: Path) -> None:
    here, there = begin(tmp_path, checkpoint_rate=10**9), Stage()
    here.engine.snapshots.pause = 1.0
    here.committed("stays", 40)
    history = here.committed(tokens=50).history
    for _ in range(20):
        here.step()
    here.clock.advance(1.0)
    here.step()  # both are written together
    here.step()
    move = Move(here, there)
    move.give(move.hold())
    page = history[:4].tobytes()
    assert any(page.hex().encode() in file.read_bytes() for file in tmp_path.glob(f"*{SUFFIX}"))
    assert here.engine.erasure.erase_traces("s") == []
    assert not any(page.hex().encode() in file.read_bytes() for file in tmp_path.glob(f"*{SUFFIX}"))
    here.engine.audit()
    assert goes_on(here, "stays", 5) == 45


def test_state_that_an_erased_session_has_saved_for_others_is_removed(tmp_path: Path) -> None:
    stage = begin(tmp_path, checkpoint_rate=10**9)
    stage.committed("s", 50)
    for _ in range(20):
        stage.step()
    stage.engine.sessions.leave(stage.engine.registry.get("s"), keep_saved=True)
    assert list(tmp_path.glob(f"*{SUFFIX}"))
    assert stage.engine.erasure.erase_traces("s") == []
    assert not list(tmp_path.glob(f"*{SUFFIX}"))
    stage.engine.audit()


def test_room_for_a_session_that_never_came_is_overwritten(tmp_path: Path) -> None:
    here, there = Stage(), Stage()
    here.committed(tokens=50)
    move = Move(here, there)
    while move.copy(10**6):
        pass
    there.engine.arrivals.drop("m")
    assert there.engine.erasure.erase_traces("s") == []
    assert not any(pool.used[unit] for pool in there.engine.pools for unit in pool.unused()[0])
