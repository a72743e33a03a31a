"""Parked memory is restored while other turns' steps run: only the turn that needs a copy waits for it, and no unit is
handed out that a copy may still write."""

from __future__ import annotations

from array import array
from functools import partial
from typing import Any

import pytest

from tenuto.base.errors import InvariantError
from tenuto.base.options import TurnParams
from tenuto.base.turns import EndReason, TurnState
from tenuto.memory.tiers.unit_files import UnitFiles
from tests.engine.slow import HISTORY, Slow
from tests.engine.stage import FULL, PAGE, STATE, Stage, continuation, count_from, every_mix, every_overlap
from tests.present import present


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
    assert (turn.state, list(turn.output), slow.engine.restores.restored) == (TurnState.RUNNING, [], 0)
    slow.engine.audit()
    assert slow.ends(turn, history) == HISTORY - 1
    assert slow.engine.restores.restored == 1


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
        assert slow.parking.tiers.copies.host_used == 0
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
        rest = present(pool.acquire(pool.free, slow.engine.restores))
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
    assert child.memory.computed == 0 < slow.parking.position(child)
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
    assert slow.engine.restores.restored == 0


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
    slow.engine.occupation.pause()
    slow.engine.occupation.release(["kv_cache"])
    assert not slow.copies.moves
    assert slow.free() == [120]
    slow.engine.occupation.restore(["kv_cache"])
    slow.engine.occupation.resume()
    slow.stage.until(lambda: turn.running)
    assert slow.ends(turn, history) == HISTORY - 1


def test_unneeded_copies_do_not_delay_a_release() -> None:
    slow = Slow()
    slow.come_back()
    slow.engine.turns.abort("s")
    assert len(slow.parking.tiers.moves) == 1
    slow.engine.occupation.release(["kv_cache"])
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
    filled = [(each.copy.group, each.unit) for move in tiers.moves._under_way for each in move.targets]
    assert not [(group, unit) for group, unit in filled if unit in engine.memory.pools[group]._free]
    slow.copies.finish()
    slow.stage.step()
    engine.audit()


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


def test_a_session_whose_pages_are_in_two_files_is_restored_whole(tmp_path) -> None:
    stage = Stage(units=60, disk=UnitFiles(tmp_path, 10**7))
    session = stage.committed("s", 40)
    for _ in range(2):
        stage.engine.pressure.drop(session)
        turn = stage.say("s", [5, 6, 7, 8, 9], 3)
        before = len(session.history)
        stage.play()
        assert present(turn.result).usage.cached == before - 1
