"""Sessions that wait while the disk is busy are written together: one file for all their pages, one for their other
units, and one change of the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tenuto.base.groups import Kind
from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.disk import DiskFailed, Listing, UnitFile
from tenuto.memory.tiers.unit_files import SUFFIX, UnitFiles
from tests.carriers import ByHand
from tests.engine.stage import FULL, SLIDING, STATE, Stage, count_from, every_mix
from tests.engine.test_saved_while_running import RATE, killed, position, running, steps
from tests.engine.test_snapshots import begin_again, goes_on
from tests.eventually import files_become
from tests.present import present
from tests.tiered import parking_in

NAMES = ("a", "bb", "ccc", "dddd")


class Slow:
    """An engine on whose disk the first session is being written while the others wait."""

    def __init__(self, tier: Path, mix: tuple[Kind, ...] = (FULL,), **options: Any) -> None:
        self.copies = ByHand()
        self.stage = running(tier, mix, carrier=self.copies, **options)
        self.listed: list[list[tuple[str, int | None]]] = []  # the sessions and positions of each change of the index
        self.fails = False
        disk = parking_in(self.stage.engine).tiers.disk
        assert isinstance(disk, UnitFiles)
        apply = disk.index.apply

        def counted(changes: Sequence[Listing]) -> None:
            if self.fails:
                raise DiskFailed("write", "a fault")
            apply(changes)
            self.listed.append([(change.key[1], change.position) for change in changes])

        disk.index.apply = counted  # type: ignore[method-assign]

    def commit(self, *names: str, tokens: int = 50) -> None:
        for name in names:
            self.stage.committed(name, tokens)

    def write(self, times: int = 1) -> None:
        """Ends what is being written, and begins the next write."""
        for _ in range(times):
            self.copies.finish()
            self.stage.engine.step()
            self.stage.engine.audit()

    def restarted(self, tier: Path, mix: tuple[Kind, ...] = (FULL,)) -> list[int]:
        """Kills the engine; returns how many tokens of each session the next one has cached."""
        saved = killed(self.stage)
        stage = begin_again(tier, saved, mix)
        return [goes_on(stage, each.session, 7) for each in saved]


@every_mix
def test_sessions_that_wait_while_the_disk_is_busy_are_written_together(mix, tmp_path: Path) -> None:
    slow = Slow(tmp_path, mix)
    slow.commit(*NAMES)
    slow.write(3)
    assert slow.listed == [[("a", 55)], [("bb", 55), ("ccc", 55), ("dddd", 55)]]
    files = {(FULL,): 2, (SLIDING,): 2, (STATE,): 1}.get(mix, 3)  # whole pages, those of windows, single positions
    files_become(tmp_path, SUFFIX, 2 * files)
    assert slow.restarted(tmp_path, mix) == [55] * 4


@every_mix
def test_a_kill_before_the_index_has_a_write_leaves_the_earlier_state_of_all_its_sessions(mix, tmp_path: Path) -> None:
    slow = Slow(tmp_path, mix)
    slow.commit(*NAMES)
    slow.write(3)
    for name in NAMES:
        slow.stage.say(name, [1, 2], 3)
        slow.stage.play()
    slow.write()
    slow.copies.advance()  # one of the files
    slow.copies.moves.clear()
    saved = killed(slow.stage)
    stage = begin_again(tmp_path, saved, mix)
    assert [goes_on(stage, name, 9) for name in NAMES] == [60, 55, 55, 55]


@every_mix
def test_a_write_that_fails_loses_only_the_checkpoints_in_it(mix, tmp_path: Path, monkeypatch: Any) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    slow = Slow(tmp_path, mix)
    slow.commit(*NAMES)
    slow.write(3)
    with monkeypatch.context() as failing:
        for name in NAMES[1:]:
            slow.stage.say(name, [1, 2], 3)
        slow.stage.engine.snapshots.pause = 1.0
        slow.stage.play()
        slow.stage.clock.advance(1.0)
        failing.setattr("tenuto.memory.tiers.unit_files.open_private", broken)
        slow.write(3)
    assert [position(slow.stage, name) for name in NAMES] == [55] * 4
    slow.stage.say("bb", [1, 2], 3)
    slow.stage.play()
    slow.stage.clock.advance(1.0)
    slow.write(3)
    assert [position(slow.stage, name) for name in NAMES] == [55, 65, 55, 55]
    assert slow.restarted(tmp_path, mix) == [55, 65, 55, 55]


@every_mix
@pytest.mark.parametrize("change", ["rewind", "close", "commit"])
def test_a_session_that_changes_while_it_is_written_with_others_costs_only_itself(
    mix, change: str, tmp_path: Path
) -> None:
    slow = Slow(tmp_path, mix)
    slow.commit(*NAMES)
    slow.write()
    slow.copies.advance()
    if change == "rewind":
        slow.stage.engine.sessions.rewind("ccc", position=30)
    elif change == "close":
        slow.stage.engine.sessions.close("ccc")
    else:
        slow.stage.say("ccc", [1, 2], 3)
        slow.stage.play()
    slow.stage.engine.audit()
    slow.copies.finish()
    slow.stage.engine.step()
    slow.stage.engine.audit()
    assert [position(slow.stage, name) for name in ("bb", "dddd")] == [55, 55]
    assert position(slow.stage, "ccc") <= {"rewind": 29, "close": 0, "commit": 60}[change]
    slow.write(4)
    there = slow.restarted(tmp_path, mix)
    if change == "close":
        assert there == [55, 55, 55]
    else:
        assert [there[0], there[1], there[3]] == [55, 55, 55]
        assert there[2] == 60 if change == "commit" else there[2] <= 29


def test_forks_that_are_written_together_share_their_pages(tmp_path: Path) -> None:
    written: list[bytes] = []

    class Counting(UnitFiles):
        def write(self, units: Mapping[int, Sequence[NamedUnit]], *, cached: bool = True) -> UnitFile:
            written.extend(unit.content.before + unit.content.tokens for group in units.values() for unit in group)
            return super().write(units, cached=cached)

    copies = ByHand()
    stage = Stage(
        (FULL,), units=300, disk=Counting(tmp_path, 10**7), carrier=copies, checkpoint_rate=RATE
    ).save_at_once()
    stage.committed("a", 20)
    stage.committed("parent", 100)
    for name in ("one", "two"):
        stage.engine.sessions.fork("parent", child=name)
    stage.say("one", [1, 2, 3], 4)
    stage.play()
    for _ in range(4):
        copies.finish()
        stage.engine.step()
        stage.engine.audit()
    assert [position(stage, name) for name in ("parent", "one", "two")] == [105, 112, 105]
    assert len(written) == len(set(written))
    saved = killed(stage)
    stage = begin_again(tmp_path, saved, identity="")
    assert [goes_on(stage, each.session, 7) for each in saved] == [25, 105, 112, 105]


def test_the_index_drops_closed_sessions_with_the_next_write(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    slow.commit(*NAMES)
    slow.write(3)
    slow.commit("eeeee")
    slow.stage.engine.sessions.close("a")
    slow.commit("ffffff")
    slow.write(2)
    assert slow.listed[2:] == [[("eeeee", 55)], [("a", None), ("ffffff", 55)]]
    slow.write()
    assert slow.restarted(tmp_path) == [55] * 5


def test_changes_in_a_write_that_fails_are_made_later(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    slow.commit(*NAMES)
    slow.write(3)
    slow.fails = True
    slow.commit("eeeee")
    slow.stage.engine.sessions.close("a")
    slow.commit("ffffff")
    slow.write(2)
    slow.fails = False
    slow.write()
    slow.stage.clock.advance(2.0)
    slow.write(2)
    assert slow.listed[-1] == [("a", None), ("eeeee", None), ("ffffff", None)]
    assert slow.restarted(tmp_path) == [55, 55, 55, 0, 0]


def test_a_rewound_session_is_listed_as_it_was_saved_last(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    slow.commit("a", "bb")
    slow.write(3)
    slow.commit("ccc")  # is being written
    slow.stage.engine.sessions.rewind("bb", position=30)
    slow.stage.say("bb", count_from(9, 10), 3)
    slow.stage.play()
    slow.write(2)
    assert slow.listed[-1] == [("bb", 29), ("bb", 42)]
    assert slow.restarted(tmp_path) == [55, 42, 55]


def test_a_write_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(tmp_path)
    page = parking_in(slow.stage.engine).tiers.copies.unit_bytes(0)
    monkeypatch.setattr("tenuto.engine.snapshots.PART", 30 * page)  # two sessions of 14 pages
    slow.commit(*NAMES, "eeeee", "ffffff")
    slow.write(4)
    assert [[name for name, _ in each] for each in slow.listed] == [["a"], ["bb", "ccc"], ["dddd", "eeeee"], ["ffffff"]]


def test_a_session_that_is_being_parked_is_written_afterwards(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    slow.commit("a", "bb")
    slow.stage.engine.pressure.drop(slow.stage.engine.registry.get("bb"))
    slow.copies.advance(4)  # the write of "a" has ended, that of the parked memory has not
    slow.stage.engine.step()
    slow.stage.engine.audit()
    assert position(slow.stage, "bb") == 0
    slow.write(3)
    assert (position(slow.stage, "a"), position(slow.stage, "bb")) == (55, 55)
    assert slow.restarted(tmp_path) == [55, 55]


def test_a_session_in_a_write_makes_no_room_for_the_next_one(tmp_path: Path) -> None:
    slow = Slow(tmp_path, budget=26 * 64)
    slow.commit("bb")  # of 14 pages
    slow.commit("a", tokens=10)  # of 4
    slow.write(3)
    slow.stage.engine.snapshots.pause = 1.0
    slow.stage.say("bb", [1, 2], 3)
    slow.stage.play()
    slow.commit("ccc")
    slow.stage.clock.advance(1.0)
    slow.write(2)
    assert [position(slow.stage, name) for name in ("a", "bb", "ccc")] == [15, 60, 0]


def test_only_memory_without_which_room_is_free_is_discarded(tmp_path: Path) -> None:
    stage = running(tmp_path, budget=30 * 64)
    stage.committed("a", 50)  # of 14 pages
    steps(stage)
    stage.committed("bb", 50)
    steps(stage)
    stage.engine.sessions.fork("a", child="fork")  # shares all pages of "a", which was used least recently
    steps(stage)
    assert position(stage, "fork") == 55
    stage.committed("ccc", 50)
    steps(stage)
    assert [position(stage, name) for name in ("a", "bb", "fork", "ccc")] == [55, 0, 55, 55]
    saved = killed(stage)
    stage = begin_again(tmp_path, saved)
    assert [goes_on(stage, name, 1) for name in ("fork", "a", "ccc", "bb")] == [55, 55, 55, 0]


def test_the_search_for_room_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenuto.memory.tiers.victims.LOOKED_AT", 30)
    stage = running(tmp_path, budget=30 * 64)
    stage.committed("a", 50)  # of 14 pages
    for name in ("one", "two"):
        stage.engine.sessions.fork("a", child=name)
    steps(stage)
    stage.committed("bb", 50)
    steps(stage)
    stage.engine.sessions.fork("a", child="three")
    steps(stage)
    stage.committed("ccc", 50)
    steps(stage)
    assert [position(stage, name) for name in ("a", "one", "two", "three", "ccc")] == [0, 0, 0, 55, 55]


def test_memory_of_an_earlier_process_makes_room_by_file(tmp_path: Path) -> None:
    slow = Slow(tmp_path, budget=50 * 64)
    slow.commit("a", "bb", "ccc")  # "bb" and "ccc" share files
    slow.write(3)
    saved = killed(slow.stage)
    stage = begin_again(tmp_path, saved, budget=30 * 64)
    index = present(parking_in(stage.engine).tiers.disk).index
    assert len(index.begin(parking_in(stage.engine).tiers.meaning)) == 3
    assert [goes_on(stage, name, 7) for name in ("ccc", "bb", "a")] == [55, 55, 0]
