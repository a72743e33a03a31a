"""An engine writes the state of sessions to disk while it runs, so that a kill at any moment costs no computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tenuto.base.groups import Kind
from tenuto.base.options import TurnParams
from tenuto.engine.snapshots import DELAY, PAUSE
from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.disk import DiskFailed, Listing, UnitFile
from tenuto.memory.tiers.unit_files import SUFFIX, UnitFiles
from tenuto.session.records import SavedSession
from tests.carriers import ByHand
from tests.engine.stage import FULL, STATE, Stage, count_from, every_mix, every_overlap
from tests.engine.test_snapshots import begin, begin_again, goes_on, outcomes
from tests.eventually import files_become
from tests.present import present
from tests.tiered import parking_in, unit_files_in

RATE = 10**9


def running(tier: Path, mix: tuple[Kind, ...] = (FULL,), **options: Any) -> Stage:
    return begin(tier, mix, **{"checkpoint_rate": RATE, **options})


def killed(stage: Stage) -> list[SavedSession]:
    """Ends an engine as `kill -9` does; returns the sessions that a journal would have."""
    stage.engine.audit()
    saved = [session.saved() for session in stage.engine.registry if session.policy.lasting]
    stage.engine.end(keep=True)
    return saved


def steps(stage: Stage, number: int = 20) -> None:
    """Lets an idle engine write."""
    for _ in range(number):
        stage.engine.step()


def position(stage: Stage, name: str) -> int:
    record = parking_in(stage.engine).saves.record(("", name))
    return record.position if record is not None else 0


@every_mix
@every_overlap
def test_a_killed_engine_leaves_the_state_of_its_sessions(mix, overlap: int, tmp_path: Path) -> None:
    stage = running(tmp_path, mix, overlap=overlap)
    for name in ("a", "bb", "ccc"):
        stage.committed(name, 50)
    stage.engine.sessions.fork("a", child="fork")
    stage.committed("fleeting", 20, hidden=True)
    steps(stage)
    saved = killed(stage)
    for again in range(3):
        stage = begin_again(tmp_path, saved, mix, overlap=overlap, checkpoint_rate=RATE)
        for session in saved:
            assert goes_on(stage, session.session, 7, again) == len(session.tokens) - 1
        assert not parking_in(stage.engine).recomputed
        assert not parking_in(stage.engine).tiers.failures
        steps(stage)
        saved = killed(stage)


@every_mix
def test_a_kill_while_a_turn_runs_leaves_the_state_of_the_last_commit(mix, tmp_path: Path) -> None:
    stage = running(tmp_path, mix)
    stage.committed("a", 50)
    stage.say("a", count_from(3, 20), 30)
    for _ in range(12):
        stage.step()
    saved = killed(stage)
    stage = begin_again(tmp_path, saved, mix)
    assert goes_on(stage, "a", 9) == 55


def test_a_session_that_has_its_next_turn_already_is_written_later(tmp_path: Path) -> None:
    stage = running(tmp_path)
    stage.engine.snapshots.pause, stage.engine.snapshots.delay = PAUSE, DELAY
    stage.committed("busy", 50)
    stage.committed("idle", 50)
    assert (position(stage, "busy"), position(stage, "idle")) == (0, 0)
    stage.say("busy", [5, 6], 200)
    stage.clock.advance(PAUSE)
    steps(stage, 5)
    assert (position(stage, "busy"), position(stage, "idle")) == (0, 55)
    stage.clock.advance(DELAY - 2 * PAUSE)
    steps(stage, 5)
    assert position(stage, "busy") == 0
    stage.clock.advance(PAUSE)
    steps(stage, 5)
    assert position(stage, "busy") == 55


def test_each_page_is_written_once_however_many_sessions_share_it(tmp_path: Path) -> None:
    written: list[bytes] = []

    class Counting(UnitFiles):
        def write(self, units: Mapping[int, Sequence[NamedUnit]], *, cached: bool = True) -> UnitFile:
            written.extend(unit.content.before + unit.content.tokens for group in units.values() for unit in group)
            return super().write(units, cached=cached)

    stage = Stage((FULL,), units=300, disk=Counting(tmp_path, 10**7), checkpoint_rate=RATE).save_at_once()
    stage.committed("parent", 100)
    steps(stage)
    for name in "abcdef":
        stage.engine.sessions.fork("parent", child=name)
    for turn in range(3):
        stage.say("a", count_from(turn, 20), 4)
        stage.play()
        steps(stage)
    assert len(written) == len(set(written))
    whole = len(stage.engine.registry.get("a").history) // 4
    assert len(written) <= whole + 1 + 3  # and the last page after each turn that ends within one


def test_long_histories_are_written_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenuto.engine.snapshots.PART", 5 * 64)  # five pages
    stage = running(tmp_path)
    stage.committed("a", 150)
    seen = {position(stage, "a")}
    for _ in range(100):
        stage.engine.step()
        seen.add(position(stage, "a"))
    assert len(seen) > 5
    assert seen >= {155}
    stage = begin_again(tmp_path, killed(stage))
    assert goes_on(stage, "a", 1) == 155


@pytest.mark.parametrize("mix", [(FULL,), (FULL, STATE)])
def test_a_kill_between_two_parts_leaves_what_can_be_resumed(mix, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tenuto.engine.snapshots.PART", 5 * 64)
    stage = running(tmp_path, mix)
    stage.committed("a", 150, 1)
    for _ in range(4):
        stage.engine.step()
    reached = position(stage, "a")
    stage = begin_again(tmp_path, killed(stage), mix)
    assert goes_on(stage, "a", 1) in ((0,) if STATE in mix else range(reached, 150))
    assert (reached > 0) == (mix == (FULL,))


@every_mix
def test_a_save_that_is_killed_before_its_index_leaves_the_earlier_state(mix, tmp_path: Path) -> None:
    stage = running(tmp_path, mix)
    stage.committed("a", 50)
    steps(stage)
    index = parking_in(stage.engine).tiers.disk.index  # type: ignore[union-attr]

    def killed_here(changes: Sequence[Listing]) -> None:
        raise DiskFailed("write", "killed")

    index.apply = killed_here  # type: ignore[method-assign]
    goes_on(stage, "a", 1, 2, 3)
    steps(stage)
    assert position(stage, "a") == 55
    stage = begin_again(tmp_path, killed(stage), mix)
    assert goes_on(stage, "a", 9) == 55


@every_mix
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_rewound_session_is_not_restored_with_the_state_of_lost_tokens(mix, when: str, tmp_path: Path) -> None:
    copies = ByHand()
    stage = running(tmp_path, mix, carrier=copies)
    stage.committed("a", 50)
    if when == "after":
        steps(stage)
        copies.finish()
        steps(stage)
    elif when == "during":
        stage.engine.step()
        copies.advance()
    stage.engine.sessions.rewind("a", position=30)
    for _ in range(3):
        copies.finish()
        stage.engine.step()
    stage.engine.audit()
    assert position(stage, "a") <= 29
    stage.say("a", count_from(9, 30), 4)
    for _ in range(40):
        copies.finish()
        stage.step()
    copies.finish()
    steps(stage)
    stage = begin_again(tmp_path, killed(stage), mix)
    assert goes_on(stage, "a", 9) == 63


@pytest.mark.parametrize("change", ["rewound", "regenerated"])
def test_the_state_of_a_changed_history_is_named_by_its_new_tokens(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.memory.tiers.contents.SPACING", 8)
    monkeypatch.setattr("tenuto.engine.snapshots.PART", 2 * 64)  # so that late pages are named without earlier ones
    stage = running(tmp_path)
    stage.committed("a", 20, 40)
    steps(stage)
    if change == "rewound":
        stage.engine.sessions.rewind("a", position=30)
    else:
        stage.engine.turns.regenerate("a", TurnParams(max_new_tokens=2))
        stage.play()
    stage.say("a", count_from(9, 30), 4)
    stage.play()
    steps(stage)
    length = len(stage.engine.registry.get("a").history)
    stage = begin_again(tmp_path, killed(stage))
    assert goes_on(stage, "a", 1) == length - 1
    assert not parking_in(stage.engine).tiers.failures


def test_a_closed_session_leaves_no_file(tmp_path: Path) -> None:
    stage = running(tmp_path)
    stage.committed("a", 50)
    steps(stage)
    assert list(tmp_path.glob(f"*{SUFFIX}"))
    stage.engine.sessions.close("a")
    steps(stage)
    files_become(tmp_path, SUFFIX, 0)
    stage = begin_again(tmp_path, killed(stage))
    assert not outcomes(stage)


def test_no_more_is_written_than_the_rate_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenuto.engine.snapshots.PART", 64)
    stage = running(tmp_path, checkpoint_rate=100)
    stage.committed("a", 150)
    saves = parking_in(stage.engine).saves
    steps(stage)
    before = saves.saved_bytes
    assert before <= 2 * 64
    stage.clock.advance(10.0)
    steps(stage, 100)
    assert before < saves.saved_bytes <= before + 10 * 100 + 64


def test_sessions_that_expire_soon_are_not_written(tmp_path: Path) -> None:
    stage = running(tmp_path)
    stage.committed("soon", 50, ttl=59.0)
    stage.committed("later", 50, ttl=3600.0)
    steps(stage)
    assert (position(stage, "soon"), position(stage, "later")) == (0, 55)


@every_mix
def test_a_failing_disk_costs_only_the_save(mix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    stage = running(tmp_path, mix)
    stage.committed("a", 50)
    steps(stage)
    with monkeypatch.context() as failing:
        failing.setattr("tenuto.memory.tiers.unit_files.open_private", broken)
        assert goes_on(stage, "a", 1, 2) == 55
        steps(stage)
        assert parking_in(stage.engine).tiers.failures["write"] > 0
        assert position(stage, "a") == 55
    assert goes_on(stage, "a", 3) == 60
    steps(stage)
    stage = begin_again(tmp_path, killed(stage), mix)
    assert goes_on(stage, "a", 9) == 64


def test_a_full_disk_keeps_the_state_of_the_sessions_used_last(tmp_path: Path) -> None:
    stage = running(tmp_path, budget=60 * 64)
    for name in ("a", "bb", "ccc", "dddd", "eeeee"):
        stage.committed(name, 50)  # of 14 pages each
        steps(stage)
    stage = begin_again(tmp_path, killed(stage))
    assert [goes_on(stage, name, 9) for name in ("eeeee", "dddd", "ccc")] == [55, 55, 55]
    assert goes_on(stage, "a", 9) == 0


def test_pages_written_ahead_of_a_state_are_dropped_with_their_tokens(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tenuto.engine.snapshots.PART", 5 * 64)
    stage = running(tmp_path, (FULL, STATE))
    stage.committed("a", 100, 1)
    assert stage.engine.idle_memory.unsaved
    stage.engine.sessions.rewind("a", position=30)
    stage.say("a", count_from(9, 60), 4)
    stage.play()
    steps(stage, 60)
    stage = begin_again(tmp_path, killed(stage), (FULL, STATE))
    assert goes_on(stage, "a", 1) == 93
    assert not parking_in(stage.engine).tiers.failures


@pytest.mark.parametrize("fails", [False, True])
def test_the_index_does_not_list_a_closed_session(fails: bool, tmp_path: Path) -> None:
    stage = running(tmp_path)
    stage.committed("a", 50)
    stage.committed("bb", 50)
    steps(stage)
    tiers = parking_in(stage.engine).tiers
    index = present(tiers.disk).index
    apply, failed = index.apply, list[Sequence[Listing]]()

    def fails_once(changes: Sequence[Listing]) -> None:
        if fails and not failed:
            failed.append(changes)
            raise DiskFailed("write", "once")
        apply(changes)

    index.apply = fails_once  # type: ignore[method-assign]
    stage.engine.sessions.close("a")
    steps(stage)
    stage.clock.advance(2.0)
    steps(stage)
    assert len(failed) == fails
    assert list(index.begin(tiers.meaning)) == [("", "bb")]


@every_mix
def test_a_saved_session_in_host_memory_comes_back_without_its_files(mix, tmp_path: Path) -> None:
    stage = running(tmp_path, mix, host_tier=10**6)
    stage.committed("a", 50)
    steps(stage)
    goes_on(stage, "a", 5)
    stage.engine.pressure.drop(stage.engine.registry.get("a"))  # the save of its last turn is under way
    steps(stage)
    tiers = parking_in(stage.engine).tiers
    assert tiers.copies.host_used > 0
    for path in unit_files_in(stage.engine, tmp_path):
        path.unlink()
    assert goes_on(stage, "a", 1) == 59
    assert not tiers.failures


@every_mix
def test_a_session_that_was_given_up_leaves_its_saved_state_for_others_and_for_no_session_here(mix, tmp_path) -> None:
    stage = running(tmp_path, mix)
    for name in ("a", "b"):
        stage.committed(name, 50)
    steps(stage)
    stage.engine.sessions.leave(stage.engine.registry.get("a"), keep_saved=True)
    stage.engine.sessions.leave(stage.engine.registry.get("b"))
    steps(stage)
    stage.engine.audit()
    assert len(parking_in(stage.engine)) == 0
    assert listed(stage, "a") == 55
    assert listed(stage, "b") == 0
    stage.committed("c", 20)
    stage.committed("a", 30)  # another session of that name
    assert goes_on(stage, "a", 7) == 35
    steps(stage)
    assert listed(stage, "a") == 30 + 5 + 1 + 3


def test_state_of_sessions_that_were_given_up_ends_with_the_weights_that_computed_it(tmp_path: Path) -> None:
    stage = running(tmp_path)
    stage.committed("a", 50)
    steps(stage)
    stage.engine.sessions.leave(stage.engine.registry.get("a"), keep_saved=True)
    stage.engine.occupation.update(stage.executor.load("other"), "other weights")
    steps(stage)
    stage.engine.audit()
    assert listed(stage, "a") == 0


def test_state_that_waits_or_is_on_its_way_to_disk_is_not_saved_yet(tmp_path: Path) -> None:
    carrier = ByHand()
    stage = running(tmp_path, carrier=carrier)
    stage.engine.snapshots.pause = PAUSE
    stage.committed("a", 50)
    session = stage.engine.registry.get("a")
    steps(stage)
    assert session in parking_in(stage.engine).unsaved
    assert not stage.engine.snapshots.is_saved(session)
    stage.clock.advance(PAUSE)
    steps(stage)
    assert session not in parking_in(stage.engine).unsaved
    assert not stage.engine.snapshots.is_saved(session)
    carrier.finish()
    steps(stage)
    assert stage.engine.snapshots.is_saved(session)


def listed(stage: Stage, name: str) -> int:
    """Returns the number of tokens for which the index lists state of a session."""
    disk = present(parking_in(stage.engine).tiers.disk)
    found = disk.index.find(("", name))
    return found.position if found is not None else 0
