"""Parked memory is restored while other turns' steps run: only the turn that needs a copy waits for it, and no unit is
handed out that a copy may still write."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tenuto.base.clock import SystemClock
from tenuto.base.config import EngineConfig
from tenuto.base.errors import InvariantError
from tenuto.base.groups import Kind
from tenuto.base.options import TurnParams
from tenuto.base.turns import EndReason, TurnState
from tenuto.engine.engine import Engine
from tenuto.engine.parking import Parking
from tenuto.engine.thread.loop import EngineLoop
from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.moves import Write
from tenuto.memory.tiers.unit_files import SUFFIX, DiskFailed, UnitFile, UnitFiles
from tenuto.session.turn import Turn
from tests.carriers import ByHand
from tests.engine.stage import (
    FULL,
    PAGE,
    STATE,
    VOCABULARY,
    Recorder,
    Stage,
    continuation,
    count_from,
    every_mix,
    every_overlap,
)
from tests.present import present
from tests.tiered import parking_in

HISTORY = 66
"""Tokens in the history of a session with 60 input tokens."""


class Slow:
    """A stage whose copies advance by hand, one page or state at a time, with a parked session "s"."""

    def __init__(self, mix: tuple[Kind, ...] = (FULL,), **options: Any) -> None:
        self.copies = ByHand(piece=1)
        given = {"units": 120, "token_budget": 24, "host_tier": 10**6, "carrier": self.copies, **options}
        self.stage = Stage(mix, **given)
        self.engine = self.stage.engine
        self.stage.told("s", 60)
        self.park("s")

    @property
    def parking(self) -> Parking:
        return parking_in(self.engine)

    def park(self, name: str) -> None:
        self.engine.pressure.drop(self.engine.registry.get(name))
        assert self.parking.has(self.engine.registry.get(name))

    def come_back(self, name: str = "s", output: int = 3, **params: Any) -> Turn:
        """Submits a turn of a parked session, which waits for its copies."""
        turn = self.stage.say(name, [5, 6], output, **params)
        self.stage.until(lambda: turn.running)
        assert turn.session.memory.arriving
        return turn

    def ends(self, turn: Turn, history: Sequence[int]) -> int:
        """Checks that the turn ends correctly; returns the number of cached tokens."""
        while not self.engine.idle:
            self.copies.finish()
            self.stage.step()
        self.engine.audit()
        assert list(turn.output) == continuation([*history, 5, 6], len(turn.output))
        assert turn.output
        return present(turn.result).usage.cached

    def free(self) -> list[int]:
        return [pool.free for pool in self.engine.memory.pools]

    def limbo(self) -> list[int]:
        return [pool.limbo for pool in self.engine.memory.pools]


@every_mix
@every_overlap
def test_other_turns_run_to_their_ends_while_a_session_is_restored(mix, overlap: int) -> None:
    slow = Slow(mix, overlap=overlap)
    history = list(slow.engine.registry.get("s").history)
    turn = slow.come_back()
    steps = len(slow.stage.executor.plans)
    for name in ("a", "bb", "ccc"):
        slow.stage.open(name)
        other = slow.stage.say(name, count_from(7, 30), 12)
        slow.stage.until(partial(getattr, other, "result"))
        assert list(other.output) == continuation(count_from(7, 30), 12)
    assert len(slow.stage.executor.plans) - steps >= 3 * 12
    assert (turn.state, list(turn.output), slow.parking.restored) == (TurnState.RUNNING, [], 0)
    slow.engine.audit()
    assert slow.ends(turn, history) == HISTORY - 1
    assert slow.parking.restored == 1


@every_mix
@pytest.mark.parametrize("end", ["abort", "barge-in", "deadline", "close", "preempt", "pause"])
def test_a_turn_that_ends_while_its_session_is_restored_leaves_it_parked(mix, end: str) -> None:
    slow = Slow(mix)
    empty, history = slow.free(), list(slow.engine.registry.get("s").history)
    turn = slow.come_back(timeout=30.0)
    session = turn.session
    taken = [a - b for a, b in zip(empty, slow.free(), strict=True)]
    slow.copies.advance()
    if end == "abort":
        slow.engine.turns.abort("s")
    elif end == "barge-in":
        slow.engine.turns.abort("s", "all")
        history += [5, 6]
    elif end == "deadline":
        slow.stage.clock.advance(31.0)
        slow.engine.step()
    elif end == "close":
        slow.engine.sessions.close("s")
    elif end == "preempt":
        slow.engine.pressure.preempt(turn)
    else:
        slow.engine.pressure.pause(turn)
    assert list(session.history) == history
    assert session.memory.computed == 0
    assert sum(slow.limbo()) > 0, "units that a copy may still write are not free"
    assert all(a + b >= c for a, b, c in zip(slow.free(), slow.limbo(), empty, strict=True))
    slow.engine.audit()
    slow.copies.finish()
    if end in ("preempt", "pause"):
        assert turn.preempted
        slow.stage.until(lambda: turn.running)
        assert slow.ends(turn, history) == HISTORY - 1
        return
    slow.stage.play()
    slow.engine.audit()
    assert slow.free() == empty
    assert any(taken)
    assert present(turn.result).reason is (EndReason.DEADLINE if end == "deadline" else EndReason.ABORT)
    if end == "close":
        assert slow.parking.tiers.host_used == 0
        return
    turn = slow.come_back()
    assert slow.ends(turn, history) == HISTORY - 1  # its state is still there, even for a longer history


@every_mix
def test_units_that_a_copy_may_still_write_are_not_handed_out(mix) -> None:
    slow = Slow(mix)
    turn = slow.come_back()
    units = [sorted(pool._written) for pool in slow.engine.memory.pools]
    assert all(units)
    slow.engine.turns.abort("s")
    for pool, written in zip(slow.engine.memory.pools, units, strict=True):
        rest = present(pool.acquire(pool.free, slow.parking))
        assert not set(written).intersection(rest.units)
        rest.release(unused=True)
    slow.copies.finish()
    slow.stage.step()
    assert slow.limbo() == [0] * len(mix)
    assert turn.result is not None


@every_mix
def test_two_sessions_that_share_restored_units_move_them_once(mix) -> None:
    slow = Slow(mix)
    history = list(slow.engine.registry.get("s").history)
    slow.engine.sessions.fork("s", child="fork")
    turn, forked = slow.come_back("s"), slow.come_back("fork")
    units, *more = (len(move.targets) for move in slow.parking.tiers.moves._under_way)
    assert sum(more) <= (FULL in mix)  # a last page, which the other continues to fill
    slow.engine.turns.abort("s")
    slow.engine.audit()
    assert slow.ends(forked, history) == HISTORY - 1  # the move continues for the one that still waits
    assert present(turn.result).committed is False
    assert slow.parking.tiers.moved["device"] == units + sum(more)


@every_mix
def test_a_fork_of_a_session_being_restored_is_parked_like_it(mix) -> None:
    slow = Slow(mix)
    history = list(slow.engine.registry.get("s").history)
    turn = slow.come_back()
    child = slow.engine.sessions.fork("s", child="fork")
    assert (child.memory.computed, slow.parking.has(child)) == (0, True)
    forked = slow.come_back("fork")
    assert slow.ends(turn, history) == slow.ends(forked, history) == HISTORY - 1


@every_mix
@pytest.mark.parametrize("drafting", [False, True], ids=["submitted", "draft"])
def test_a_copy_that_fails_halfway_costs_only_time(mix, drafting: bool) -> None:
    slow = Slow(mix)
    history = list(slow.engine.registry.get("s").history)
    if drafting:
        turn = slow.engine.turns.draft("s", [5, 6])
        slow.stage.step()
        assert turn.session.memory.arriving
    else:
        turn = slow.come_back()
    slow.copies.advance(int(mix != (STATE,)))
    slow.stage.executor._copy_fails = lambda: True
    slow.copies.finish()
    slow.stage.executor._copy_fails = lambda: False
    slow.stage.step()
    slow.engine.audit()
    assert slow.parking.recomputed == {"copy failed": 1}
    if drafting:
        turn = slow.engine.turns.submit("s", [5, 6], TurnParams(max_new_tokens=3))
    assert slow.ends(turn, history) <= HISTORY + 1
    assert slow.parking.restored == 0


def test_a_draft_changed_while_its_session_is_restored_is_computed_as_changed() -> None:
    slow = Slow()
    history = list(slow.engine.registry.get("s").history)
    slow.engine.turns.draft("s", [9, 9, 9])
    slow.stage.step()
    slow.copies.advance()
    slow.engine.turns.draft("s", [5, 6, 7])
    slow.stage.step()
    slow.engine.audit()
    turn = slow.engine.turns.submit("s", [5, 6], TurnParams(max_new_tokens=3))
    assert slow.ends(turn, history) >= HISTORY - 1


def test_an_empty_turn_of_a_parked_session_commits_once_it_is_restored() -> None:
    slow = Slow()
    turn = slow.stage.append("s", [])
    slow.stage.until(lambda: turn.running)
    slow.copies.finish()
    slow.stage.play()
    assert present(turn.result).reason is EndReason.APPENDED
    assert slow.engine.registry.get("s").memory.computed == HISTORY - 1
    slow.engine.audit()


def test_releasing_memory_waits_for_its_copies() -> None:
    slow = Slow()
    history = list(slow.engine.registry.get("s").history)
    turn = slow.come_back()
    slow.engine.pause()
    slow.engine.release_memory(["kv_cache"])
    assert not slow.copies.moves
    assert slow.free() == [120]
    slow.engine.restore_memory(["kv_cache"])
    slow.engine.resume()
    slow.stage.until(lambda: turn.running)
    assert slow.ends(turn, history) == HISTORY - 1


def test_unneeded_copies_do_not_delay_a_release() -> None:
    slow = Slow()
    slow.come_back()
    slow.engine.turns.abort("s")
    assert len(slow.parking.tiers.moves) == 1
    slow.engine.release_memory(["kv_cache"])
    assert slow.engine.idle
    assert slow.free() == [120]


def test_a_bug_in_a_copy_stops_the_engine() -> None:
    slow = Slow()
    slow.come_back()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    slow.stage.executor.write_units = fail  # type: ignore[method-assign, assignment]
    slow.copies.finish()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        slow.stage.step()


# -- from host memory to disk


@every_mix
def test_steps_continue_while_a_session_is_written_to_disk(mix, tmp_path: Path) -> None:
    disk = UnitFiles(tmp_path, 10**7)
    slow = Slow(mix, host_tier=0, disk=disk)
    tiers, history = slow.parking.tiers, list(slow.engine.registry.get("s").history)
    assert (len(tiers.writes), tiers.disk_used, tiers.moved["disk"]) == (1, 0, 0)
    slow.stage.told("other", 20)
    slow.engine.audit()
    slow.parking.audit()
    assert tiers.host_used > 0
    slow.copies.finish()
    slow.stage.step()
    slow.parking.audit()
    assert (len(tiers.writes), tiers.host_used) == (0, 0)
    assert tiers.disk_used > 0
    assert slow.ends(slow.come_back(), history) == HISTORY - 1
    slow.engine.end()


@every_mix
@pytest.mark.parametrize("fails", [False, True])
def test_a_session_is_restored_while_it_is_being_written(
    mix, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = UnitFiles(tmp_path, 10**7)
    if fails:
        monkeypatch.setattr("tenuto.memory.tiers.unit_files.save_file", lambda *_: (tmp_path / "no" / "file").touch())
    slow = Slow(mix, host_tier=0, disk=disk)
    history = list(slow.engine.registry.get("s").history)
    turn = slow.come_back()
    assert slow.ends(turn, history) == HISTORY - 1
    tiers = slow.parking.tiers
    slow.parking.audit()
    assert tiers.failures == ({"write": 1} if fails else {})
    assert (tiers.host_used, len(list(tmp_path.glob(f"*{SUFFIX}")))) == (0, not fails)
    slow.engine.sessions.close("s")
    assert (tiers.disk_used, len(tiers), len(list(tmp_path.glob(f"*{SUFFIX}")))) == (0, 0, 0)
    slow.engine.end()


def test_a_session_closed_while_it_is_being_written_leaves_no_file(tmp_path: Path) -> None:
    slow = Slow(host_tier=0, disk=UnitFiles(tmp_path, 10**7))
    slow.engine.sessions.close("s")
    slow.copies.finish()
    slow.stage.step()
    slow.parking.audit()
    tiers = slow.parking.tiers
    assert (tiers.host_used, tiers.disk_used, list(tmp_path.glob(f"*{SUFFIX}"))) == (0, 0, [])
    slow.engine.end()


def test_unfinished_writes_to_disk_stay_within_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(host_tier=0, disk=UnitFiles(tmp_path, 10**7))
    tiers = slow.parking.tiers
    monkeypatch.setattr("tenuto.memory.tiers.tiers.MAX_LEAVING", tiers.host_used + 10)
    slow.stage.told("other", 20)
    assert len(tiers.writes) == 1
    slow.engine.pressure.drop(slow.engine.registry.get("other"))
    assert len(tiers.writes) == 1  # the first has been waited for
    assert tiers.disk_used > 0
    slow.parking.audit()
    slow.engine.end()


# -- with threads


class Gate(UnitFiles):
    """A disk that reads nothing while the gate is shut."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 10**7)
        self.open = threading.Event()
        self.reading = threading.Event()

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[NamedUnit]]:
        self.reading.set()
        assert self.open.wait(60)
        return super().read(file, rows)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    disk = Gate(tmp_path)
    disk.open.set()
    yield disk
    disk.open.set()


def threaded(disk: Gate) -> Engine:
    """Makes an engine with its own threads, and a session "s" whose memory is on disk."""
    executor = Recorder(PAGE, Stage((FULL,)).executor.spec.groups, VOCABULARY)
    config = EngineConfig(context_length=200, max_running=4, token_budget=24, prefix_cache=False)
    engine = Engine(
        executor, (120,), config, vocab_size=VOCABULARY, eos_ids=(), clock=SystemClock(), random=Random(0), disk=disk
    )
    engine.sessions.open("s")
    engine.turns.submit("s", count_from(1, 60), TurnParams(max_new_tokens=6))
    while not engine.idle:
        engine.step()
    engine.pressure.drop(engine.registry.get("s"))
    parking_in(engine).finish()
    return engine


def test_streams_continue_while_the_disk_is_read_and_then_the_restored_turn_runs(gate: Gate) -> None:
    engine = threaded(gate)
    history = list(engine.registry.get("s").history)
    gate.open.clear()
    loop = EngineLoop(engine)
    said: dict[str, list[int]] = {"s": [], "other": []}
    ended = {name: threading.Event() for name in said}

    def submit(name: str, tokens: Sequence[int], output: int) -> None:
        def begin(engine: Engine) -> None:
            turn = engine.turns.submit(name, tokens, TurnParams(max_new_tokens=output))

            def told(delta: Any) -> None:
                said[name].extend(delta.tokens)
                if delta.result is not None:
                    ended[name].set()

            loop.subscribe(turn, told)

        loop.execute(begin).result(60)

    try:
        submit("s", [5, 6], 3)
        assert gate.reading.wait(60)
        loop.execute(lambda engine: engine.sessions.open("other")).result(60)
        submit("other", count_from(9, 20), 40)
        assert ended["other"].wait(60)
        assert said == {"s": [], "other": continuation(count_from(9, 20), 40)}
        gate.open.set()
        assert ended["s"].wait(60)
        assert said["s"] == continuation([*history, 5, 6], 3)
    finally:
        gate.open.set()
        loop.close()
        engine.end()
    assert parking_in(engine).restored == 1


def test_an_ending_engine_waits_for_its_copies(gate: Gate) -> None:
    engine = threaded(gate)
    gate.open.clear()
    engine.turns.submit("s", [5, 6], TurnParams(max_new_tokens=3))
    engine.step()
    assert gate.reading.wait(60)
    ended = threading.Event()

    def end() -> None:
        engine.end(keep=True)
        ended.set()

    thread = threading.Thread(target=end)
    thread.start()
    assert not ended.is_set()
    gate.open.set()
    thread.join(60)
    assert ended.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tenuto-copies")]


def test_a_damaged_file_is_noticed_by_the_thread_that_reads_it(gate: Gate, tmp_path: Path) -> None:
    engine = threaded(gate)
    history = list(engine.registry.get("s").history)
    for path in tmp_path.glob(f"*{SUFFIX}"):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    turn = engine.turns.submit("s", [5, 6], TurnParams(max_new_tokens=3))
    while not engine.idle:
        engine.step()
        parking = parking_in(engine)
        for move in list(parking.tiers.moves._under_way):
            move.ended.wait(60)
    assert list(turn.output) == continuation([*history, 5, 6], 3)
    assert parking.recomputed == {"unreadable": 1}
    assert parking.tiers.failures == {"checksum": 1}
    engine.end()


# -- the pool


def test_a_pool_keeps_units_being_written_apart_until_the_copy_has_ended() -> None:
    pool = Stage((FULL,), units=60).engine.memory.pools[0]
    holder = Stage((FULL,)).engine._admission
    lease = present(pool.acquire(3, holder))
    first, second, third = lease.units
    pool.copy_begins([first, second])
    lease.release()
    assert (pool.free, pool.limbo, pool.leased) == (58, 2, 0)
    pool.check_totals()
    assert sorted(pool.unused()[1]) == sorted([first, second])
    with pytest.raises(InvariantError, match="nobody holds"):
        pool.share(array("i", [first]), holder)
    pool.step_submitted()
    pool.copy_ended([first, second])
    assert (pool.free, pool.limbo) == (58, 2), "a step in flight may have it in its tables"
    pool.step_settled()
    assert (pool.free, pool.limbo) == (60, 0)
    many = present(pool.acquire(40, holder))
    pool.copy_begins([third])
    many.release()
    assert pool.limbo == (1 if third in pool._stranded else 0)


def test_a_restore_cancelled_before_it_begins_keeps_no_units_while_others_read(gate: Gate) -> None:
    engine = threaded(gate)
    for name in ("t", "u"):
        engine.sessions.open(name)
        engine.turns.submit(name, [ord(name), *count_from(1, 59)], TurnParams(max_new_tokens=6))
        while not engine.idle:
            engine.step()
        engine.pressure.drop(engine.registry.get(name))
        parking_in(engine).finish()
    gate.open.clear()
    for name in ("s", "t"):  # both threads wait for the disk
        engine.turns.submit(name, [5], TurnParams(max_new_tokens=3))
    engine.step()
    assert gate.reading.wait(60)
    pool, left = engine.memory.pools[0], []
    for _ in range(3):
        engine.turns.submit("u", [5], TurnParams(max_new_tokens=3))
        engine.step()
        engine.turns.abort("u")
        engine.step()
        left.append((pool.free, pool.limbo))
    assert left == 3 * left[:1]
    gate.open.set()
    engine.end()


@every_mix
def test_a_copy_that_fails_while_another_session_joins_it_still_owns_its_units(mix, monkeypatch) -> None:
    """The engine's thread learns of a failed copy only between steps."""
    slow = Slow(mix)
    engine, tiers, executor = slow.engine, slow.parking.tiers, slow.stage.executor
    engine.sessions.fork("s", child="fork")
    slow.come_back("s")
    bring_back = tiers.bring_back

    def fails_first(*given: Any) -> Any:
        executor._copy_fails = lambda: True
        slow.copies.moves.pop(0).advance()
        executor._copy_fails = lambda: False
        monkeypatch.undo()
        return bring_back(*given)

    monkeypatch.setattr(tiers, "bring_back", fails_first)
    slow.stage.say("fork", [5, 6], 3)
    engine.step()
    engine.step()
    engine.turns.abort("fork")
    engine.turns.abort("s")
    filled = [(each.group, each.unit) for move in tiers.moves._under_way for each in move.targets]
    assert not [(group, unit) for group, unit in filled if unit in engine.memory.pools[group]._free]
    slow.copies.finish()
    slow.stage.step()
    engine.audit()


def test_a_write_that_fails_while_a_snapshot_waits_for_it_loses_no_other_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(host_tier=0, disk=UnitFiles(tmp_path, 10**7))
    engine, tiers, disk = slow.engine, slow.parking.tiers, present(slow.parking.tiers._disk)
    writes = [job for job in slow.copies.moves if isinstance(job, Write)]
    assert writes
    engine.sessions.fork("s", child="fork")
    slow.copies.moves.clear()
    slow.stage.say("fork", [5, 6], 20)
    for _ in range(60):
        slow.copies.finish()
        slow.stage.step()
    slow.copies.moves[:] = writes
    write, tried = disk.write, []

    def fails_once(units: Mapping[int, Sequence[NamedUnit]]) -> UnitFile:
        tried.append(units)
        if len(tried) == 1:
            raise DiskFailed("write", "once")
        return write(units)

    monkeypatch.setattr(disk, "write", fails_once)
    monkeypatch.setattr("tenuto.memory.tiers.tiers.MAX_LEAVING", tiers.host_used + 1)
    engine.sessions.save()
    assert len(tried) > 1
    assert engine.snapshots.counts == {"saved": 1}
    engine.end(keep=True)


def test_a_session_whose_restore_is_given_up_hides_no_prefix_from_others() -> None:
    slow = Slow((STATE,), prefix_cache=True, checkpoint_interval=16, units=200)
    engine, stage = slow.engine, slow.stage
    stage.open("q")
    stage.say("q", count_from(5, 90), 6)
    stage.play()
    session = engine.registry.get("q")
    assert slow.parking.park(session)
    position = slow.parking._sessions[session].position
    stage.say("q", [7] * 20, 3)
    stage.play()
    for checkpoint in list(session.memory.checkpoints):
        if 60 < checkpoint.position <= position + 5 and not checkpoint.pins:
            engine.memory.cache._evict(checkpoint)
    engine.sessions.rewind("q", position=position + 1)
    turn = slow.come_back("q")
    engine.pressure.preempt(turn)
    assert engine.prefixes._entered.get(session, 0) * PAGE <= session.memory.computed


def broken(*_: Any, **__: Any) -> None:
    raise OSError(30, "Read-only file system")


def no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize("writing", [broken, no_memory])
def test_a_disk_that_can_neither_write_nor_delete_costs_only_time(writing, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tenuto.memory.tiers.unit_files.save_file", writing)
    monkeypatch.setattr(Path, "unlink", broken)
    slow = Slow(host_tier=0, disk=UnitFiles(tmp_path, 10**7))
    history = list(slow.engine.registry.get("s").history)
    slow.copies.finish()
    slow.stage.step()
    slow.ends(slow.stage.say("s", [5, 6], 3), history)
    monkeypatch.undo()
    slow.park("s")
    slow.copies.finish()
    slow.stage.step()
    monkeypatch.setattr(Path, "unlink", broken)
    slow.engine.sessions.close("s")
    slow.engine.audit()


def test_a_session_whose_pages_are_in_two_files_is_restored_whole(tmp_path) -> None:
    stage = Stage(units=60, disk=UnitFiles(tmp_path, 10**7))
    session = stage.told("s", 40)
    for _ in range(2):
        stage.engine.pressure.drop(session)
        turn = stage.say("s", [5, 6, 7, 8, 9], 3)
        before = len(session.history)
        stage.play()
        assert present(turn.result).usage.cached == before - 1
