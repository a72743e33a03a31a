"""An engine that ends leaves the memory of its sessions on disk, and the next one continues with it: anything that does
not verify is recomputed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tenuto.base.groups import Kind
from tenuto.engine.snapshots import Snapshots
from tenuto.memory.tiers.unit_files import INDEX, SUFFIX, UnitFiles
from tenuto.session.records import SavedSession
from tests.engine.stage import FULL, STATE, Stage, continuation, count_from, every_mix, every_overlap
from tests.eventually import files_become
from tests.present import present
from tests.tiered import parking_in

BUDGET = 10**7


def begin(tier: Path, mix: tuple[Kind, ...] = (FULL,), *, identity: str = "a model", **options: Any) -> Stage:
    disk = UnitFiles(tier, options.pop("budget", BUDGET), identity)
    stage = Stage(mix, **{"units": 300, "token_budget": 24, "disk": disk, "identity": identity, **options})
    return stage.save_at_once()


def end(stage: Stage) -> list[SavedSession]:
    """Ends an engine cleanly; returns the sessions that a journal would have."""
    saved = [session.saved() for session in stage.engine.registry if session.policy.lasting]
    stage.engine.sessions.save()
    stage.engine.audit()
    stage.engine.end(keep=True)
    return saved


def begin_again(tier: Path, saved: list[SavedSession], mix: tuple[Kind, ...] = (FULL,), **options: Any) -> Stage:
    stage = begin(tier, mix, **options)
    for session in saved:
        stage.engine.sessions.restore(session)
    stage.engine.sessions.recover()
    stage.engine.audit()
    return stage


def snapshots(stage: Stage) -> Snapshots:
    assert isinstance(stage.engine.snapshots, Snapshots)
    return stage.engine.snapshots


def outcomes(stage: Stage) -> dict[str, int]:
    return dict(snapshots(stage).counts)


def goes_on(stage: Stage, name: str, *tokens: int) -> int:
    """Checks that the session continues correctly; returns the number of cached tokens."""
    history = list(stage.engine.registry.get(name).history)
    turn = stage.say(name, tokens, 3)
    stage.play()
    stage.engine.audit()
    assert list(turn.output) == continuation([*history, *tokens], 3)
    return present(turn.result).usage.cached


@every_mix
@every_overlap
def test_sessions_are_restored_with_their_state(mix, overlap: int, tmp_path: Path) -> None:
    stage = begin(tmp_path, mix, overlap=overlap, units=60 if FULL in mix else 24)
    for number in range(8):  # more than fit: some are parked already
        stage.committed("x" * (number + 1), 60)
    stage.engine.sessions.fork("x", child="fork", position=40)
    stage.committed("fleeting", 20, hidden=True)
    stage.reach("mid-decode", "xx")  # rolled back
    stage.say("xxx", [5], 2)  # waits
    saved = end(stage)
    for again in range(2):  # the state of the first engine, then that of the second
        stage = begin_again(tmp_path, saved, mix, overlap=overlap, units=60 if FULL in mix else 24)
        assert outcomes(stage)["restored"] >= 8
        for session in saved:
            length = len(session.tokens)
            cached = goes_on(stage, session.session, 7, again)
            assert cached == length - 1 or (session.session == "fork" and mix != (FULL,))
        assert not parking_in(stage.engine).recomputed
        saved = end(stage)


def test_units_that_sessions_share_are_written_once(tmp_path: Path) -> None:
    stage = begin(tmp_path)
    stage.committed("parent", 160)
    for name in "abcdef":
        stage.engine.sessions.fork("parent", child=name)
    held = stage.engine.memory.pools[0].leased
    end(stage)
    stage = begin(tmp_path)
    tiers = parking_in(stage.engine).tiers
    index = present(tiers.disk).index
    sessions = index.begin(tiers.meaning)
    places = {(run.file, run.row + i) for key in sessions for run in index.runs(key) for i in range(run.number)}
    assert len(sessions) == 7
    assert len(places) == held


@every_mix
def test_a_history_that_grew_or_was_rewound_reuses_its_unchanged_part(mix, tmp_path: Path) -> None:
    stage = begin(tmp_path, mix)
    for name in ("on", "back", "other", "gone"):
        stage.committed(name, 50)
    saved = {each.session: each for each in end(stage)}
    later = Stage(mix)
    for each in saved.values():
        later.engine.sessions.restore(each)
    later.say("on", [1, 2, 3], 4)
    later.play()
    later.engine.sessions.rewind("back", position=33)
    later.engine.sessions.rewind("other", position=30)
    later.say("other", count_from(9, 30), 4)
    later.play()
    later.engine.sessions.close("gone")
    stage = begin_again(tmp_path, [session.saved() for session in later.engine.registry], mix)
    assert goes_on(stage, "on", 8) == 55
    assert goes_on(stage, "back", 8) == (32 if mix == (FULL,) else 0)
    assert goes_on(stage, "other", 8) == (28 if mix == (FULL,) else 0)  # the whole pages before position 30
    # "other" is found to differ when its turn comes
    assert outcomes(stage) == {"restored": 2, "partly": 1} if mix == (FULL,) else {"restored": 2, "stale": 2}
    stage.engine.sessions.close("on")
    stage.engine.sessions.close("back")
    stage.engine.sessions.close("other")
    assert parking_in(stage.engine).tiers.copies.disk_used == 0
    files_become(tmp_path, SUFFIX, 0)


def spoil(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@every_mix
@pytest.mark.parametrize(("harm", "cause"), [("damaged", "checksum"), ("cut", "read"), ("of another model", "foreign")])
def test_a_file_that_does_not_verify_costs_only_time(mix, harm: str, cause: str, tmp_path: Path) -> None:
    saved = two_sessions(tmp_path, mix)
    for path in tmp_path.glob(f"*{SUFFIX}"):
        if harm == "damaged":
            spoil(path, -5)
        elif harm == "cut":
            path.write_bytes(path.read_bytes()[:-7])
        else:
            path.write_bytes(path.read_bytes().replace(b'"identity":"a model"', b'"identity":"another"'))
    stage = begin_again(tmp_path, saved, mix)
    assert [goes_on(stage, each.session, 7) for each in saved] == [0, 0]
    assert parking_in(stage.engine).tiers.failures == Counter({cause: 2})
    assert stage.engine.counts.recomputed["parked"] == 110


@pytest.mark.parametrize(
    ("harm", "outcome"),
    [
        ("no files", "missing"),
        ("damaged", "damaged"),
        ("cut", "damaged"),
        ("another model", "foreign"),
        ("other pages", "foreign"),
    ],
)
def test_an_index_that_does_not_verify_costs_only_time(harm: str, outcome: str, tmp_path: Path) -> None:
    saved, other = two_sessions(tmp_path), dict[str, Any]()
    if harm == "no files":
        for path in tmp_path.glob(f"*{SUFFIX}"):
            path.unlink()
    elif harm == "damaged":
        spoil(tmp_path / INDEX, 3)
    elif harm == "cut":
        (tmp_path / INDEX).write_bytes((tmp_path / INDEX).read_bytes()[:4096])
    else:
        other = {"identity": "another model"} if harm == "another model" else {"page_size": 8}
    stage = begin_again(tmp_path, saved, **other)
    assert outcomes(stage)[outcome] > 0
    assert [goes_on(stage, each.session, 7) for each in saved] == [0, 0]
    assert parking_in(stage.engine).tiers.copies.disk_used == 0
    files_become(tmp_path, SUFFIX, 0)


@pytest.mark.parametrize("at", range(0, 16_384, 61))
def test_a_damaged_index_changes_no_token(at: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    tier = tmp_path_factory.mktemp("tier")
    saved = two_sessions(tier)
    spoil(tier / INDEX, at)
    stage = begin_again(tier, saved)
    for each in saved:
        goes_on(stage, each.session, 7)


def two_sessions(tier: Path, mix: tuple[Kind, ...] = (FULL,)) -> list[SavedSession]:
    """Leaves two sessions on disk, each in separate files."""
    stage = begin(tier, mix)
    stage.committed("a", 50)
    stage.engine.snapshots.save([stage.engine.registry.get("a")], 1.0)
    stage.committed("bb", 50)
    return end(stage)


def test_a_killed_engine_leaves_nothing_misleading(tmp_path: Path) -> None:
    saved = two_sessions(tmp_path)
    second = begin_again(tmp_path, saved)
    goes_on(second, "a", 1)
    second.engine.sessions.close("bb")
    second.committed("ccc", 90)
    journaled = [session.saved() for session in second.engine.registry]
    second.engine.end(keep=True)  # as kill -9: nothing is written
    third = begin_again(tmp_path, [*journaled, saved[1]])
    assert goes_on(third, "a", 2) == 55  # from the first engine's snapshot
    assert goes_on(third, "ccc", 2) == 0
    assert goes_on(third, "bb", 2) == 0  # its file is gone
    assert outcomes(third) == {"restored": 1}
    files_become(tmp_path, SUFFIX, 2)  # the whole pages, and the last


def test_a_snapshot_cut_short_by_its_time_limit_has_the_most_recently_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.snapshots.TOGETHER", 1)
    stage = begin(tmp_path, snapshot_seconds=2.0)
    for name in ("a", "bb", "ccc", "dddd"):
        stage.committed(name, 40)
        stage.clock.advance(1.0)
    disk = parking_in(stage.engine).tiers._disk
    assert isinstance(disk, UnitFiles)
    slowly = disk.write

    def write_slowly(units: Any, *, cached: bool = True) -> Any:
        stage.clock.advance(0.75)  # two files a session
        return slowly(units, cached=cached)

    disk.write = write_slowly  # type: ignore[method-assign]
    saved = end(stage)
    assert outcomes(stage) == {"saved": 2, "not saved": 2}
    stage = begin_again(tmp_path, saved)
    assert [goes_on(stage, name, 1) for name in ("a", "bb", "ccc", "dddd")] == [0, 0, 45, 45]


@pytest.mark.parametrize("harm", ["full", "unwritten", "unreadable"])
def test_a_disk_that_fails_a_snapshot_costs_only_time(harm: str, tmp_path: Path) -> None:
    stage = begin(tmp_path, budget=500 if harm == "full" else BUDGET)
    stage.committed("a", 60)
    if harm == "unwritten":
        (tmp_path / INDEX).mkdir()
    saved = end(stage)
    if harm == "unreadable":
        (tmp_path / INDEX).unlink()
        (tmp_path / INDEX).mkdir()
    again = begin_again(tmp_path, saved)
    assert goes_on(again, "a", 1) == 0
    if harm == "unreadable":
        assert outcomes(again) == {harm: 1}
    else:
        assert outcomes(stage) == {"not saved": 1}
    files_become(tmp_path, SUFFIX, 0)


def test_state_is_restored_only_at_its_own_position(tmp_path: Path) -> None:
    """A fork at a position that is not resumable has no memory of its parent."""
    stage = begin(tmp_path, (STATE,))
    stage.committed("s", 40)
    saved = end(stage)
    stage = begin_again(tmp_path, saved, (STATE,))
    stage.engine.sessions.fork("s", position=20, child="part")
    stage.engine.sessions.fork("s", child="whole")
    assert goes_on(stage, "part", 1) == 0
    assert goes_on(stage, "whole", 1) == 45


@pytest.mark.parametrize(("identity", "cached"), [("a model", 0), ("another", 35)])
def test_memory_computed_with_new_weights_has_a_new_identity(tmp_path: Path, identity: str, cached: int) -> None:
    first = begin(tmp_path)
    first.engine.occupation.update(first.executor.load(None), "another")
    first.committed("s")
    saved = end(first)
    second = begin_again(tmp_path, saved, identity=identity)
    assert goes_on(second, "s", 7) == cached
