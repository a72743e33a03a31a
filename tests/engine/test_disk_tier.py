"""A file on disk is used only if it has the expected content, and a full disk deletes the least recently used."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.errors import InvariantError
from tenuto.base.options import Scope
from tenuto.engine.parking import Parking
from tenuto.memory.tiers.contents import Content, Digests, NamedUnit
from tenuto.memory.tiers.disk import DiskFailed, UnitFile
from tenuto.memory.tiers.lent import LentUnits
from tenuto.memory.tiers.rates import Rates
from tenuto.memory.tiers.unit_files import INDEX, SUFFIX, UnitFiles
from tenuto.session.records import SavedSession
from tests.carriers import ByHand
from tests.engine.stage import FULL, PAGE, STATE, Stage, continuation, count_from, every_mix
from tests.eventually import files_become
from tests.present import present
from tests.tiered import parking_in

UNIT = 16 * PAGE
"""Bytes of a full attention page on the witness."""


def make(tier: Path, mix: Any = (FULL,), **options: Any) -> Stage:
    disk = UnitFiles(tier, options.pop("budget", 10**7), "a model")
    return Stage(mix, **{"units": 120, "token_budget": 64, "disk": disk, "identity": "a model", **options})


def parking(stage: Stage) -> Parking:
    return parking_in(stage.engine)


def park(stage: Stage, *names: str) -> None:
    for name in names:
        stage.engine.pressure.drop(stage.engine.registry.get(name))


def parked(stage: Stage) -> list[str]:
    return [session.id for session in stage.engine.registry if parking(stage).position(session)]


def save_as_used(stage: Stage, *times: float) -> list[tuple[SavedSession, float]]:
    """Saves the state of sessions whose last turns ended at these times."""
    saved = []
    for session, used in zip(stage.engine.registry, times, strict=True):
        session.last_turn_end = used
        saved.append((session.saved(), used))
    stage.engine.sessions.save()
    return saved


def recover_as_used(stage: Stage, saved: list[tuple[SavedSession, float]]) -> None:
    """Restores these sessions and recovers their state."""
    for each, used in saved:
        stage.engine.sessions.restore(each).last_turn_end = used
    stage.engine.sessions.recover()


def park_all(stage: Stage, *names: str, tokens: int = 30) -> None:
    """Makes sessions with different histories and parks them one after another."""
    for number, name in enumerate(names):
        stage.open(name)
        stage.say(name, count_from(number + 1, tokens), 2)
        stage.play()
        park(stage, name)


def goes_on(stage: Stage, name: str, tenant: str = "") -> int:
    """Checks that the session continues correctly; returns the number of cached tokens."""
    history = list(stage.engine.registry.get(name, tenant).history)
    turn = stage.say(name, [7], 3, tenant)
    stage.play()
    stage.engine.audit()
    assert list(turn.output) == continuation([*history, 7], 3)
    return present(turn.result).usage.cached


def exchange(tier: Path) -> None:
    """Gives every file the content of another."""
    files = sorted(tier.glob(f"*{SUFFIX}"))
    assert len(files) > 1
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


# -- swapped files


@every_mix
def test_swapped_files_are_not_mistaken_for_each_other(mix, tmp_path: Path) -> None:
    stage = make(tmp_path, mix)
    park_all(stage, "a", "b", "c")
    exchange(tmp_path)
    assert [goes_on(stage, name) for name in "abc"] == [0, 0, 0]
    assert parking(stage).tiers.failures == {"content": 3}
    assert parking(stage).recomputed == {"unreadable": 3}


@every_mix
def test_files_swapped_between_two_processes_are_not_mistaken_for_each_other(mix, tmp_path: Path) -> None:
    stage = make(tmp_path, mix)
    park_all(stage, "a", "b")
    saved = [session.saved() for session in stage.engine.registry]
    stage.engine.sessions.save()
    stage.engine.end(keep=True)
    exchange(tmp_path)
    stage = make(tmp_path, mix)
    for each in saved:
        stage.engine.sessions.restore(each)
    stage.engine.sessions.recover()
    assert [goes_on(stage, name) for name in "ab"] == [0, 0]
    assert parking(stage).tiers.failures == {"content": 2}


@every_mix
def test_a_tenant_never_gets_another_tenants_state_even_for_the_same_words(mix, tmp_path: Path) -> None:
    stage = make(tmp_path, mix)
    for tenant in ("one", "two"):
        session = stage.open("s", tenant=tenant)
        stage.say("s", count_from(3, 30), 2, tenant)
        stage.play()
        stage.engine.pressure.drop(session)
    exchange(tmp_path)
    assert [goes_on(stage, "s", tenant) for tenant in ("one", "two")] == [0, 0]
    assert parking(stage).tiers.failures == {"content": 2}


def test_swapped_rows_within_a_file_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    """Two forks whose last pages start alike and then differ have one file each."""
    stage = make(tmp_path)
    park_all(stage, "s", tokens=17)
    for name, token in (("s", 1), ("fork", 2)):
        if name == "fork":
            stage.engine.sessions.fork("s", position=18, child="fork")
        stage.append(name, [token])
        stage.play()
        park(stage, name)
    exchange(tmp_path)
    for name in ("s", "fork"):
        assert goes_on(stage, name) < 19


def test_a_session_is_exported_without_state_of_other_content(tmp_path: Path) -> None:
    stage = make(tmp_path)
    park_all(stage, "a", "b")
    exchange(tmp_path)
    lent = stage.engine.states.of("a")
    assert isinstance(lent, LentUnits)
    state = lent.read()
    stage.engine.states.take_back(lent)
    assert (state.position, parking(stage).tiers.failures) == (0, {"content": 1})
    stage.engine.audit()


def test_a_session_is_never_exported_without_some_of_its_units() -> None:
    """A unit that is nowhere, a bug of ours, ends with a report and not with a shorter state."""
    stage = Stage(host_tier=2**20)
    park_all(stage, "a")
    lent = stage.engine.states.of("a")
    assert isinstance(lent, LentUnits)
    lent.units = [[unit._replace(data=None) if i == 1 else unit for i, unit in enumerate(lent.units[0])]]
    with pytest.raises(InvariantError, match="neither in host memory nor in a file"):
        lent.read()


def test_parked_memory_is_compared_with_the_tokens_of_the_session_that_gets_it(tmp_path: Path) -> None:
    """A bug of ours in memory ends with a report and not with a wrong answer."""
    stage = make(tmp_path)
    park_all(stage, "a", "b")
    a, b = (stage.engine.registry.get(name) for name in "ab")
    known = parking(stage)._sessions
    known[a], known[b] = known[b], known[a]
    stage.say("a", [7], 3)
    with pytest.raises(InvariantError, match="of other tokens"):
        stage.play()


def test_a_history_of_the_same_length_has_names_of_its_own(tmp_path: Path) -> None:
    stage = make(tmp_path, host_tier=10**6)
    stage.committed("a", 50)
    park(stage, "a")
    stage.engine.sessions.rewind("a", position=0)
    stage.say("a", count_from(9, 50), 6)
    stage.play()
    park(stage, "a")
    stage.committed("bb", 20)
    park(stage, "bb")
    history = list(stage.engine.registry.get("a").history)
    turn = stage.say("a", [7], 3)
    stage.play()
    assert list(turn.output) == continuation([*history, 7], 3)
    assert present(turn.result).usage.cached == 55


def test_files_hold_what_was_written_however_rows_are_chosen_and_writes_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writes_a_little(file: int, parts: Sequence[memoryview]) -> int:
        return os.write(file, b"".join(parts)[:37])

    monkeypatch.setattr("tenuto.memory.tiers.file_writes.PARTS", 5)
    monkeypatch.setattr("os.writev", writes_a_little)
    units = random_units(30)
    disk = UnitFiles(tmp_path, 10**7)
    file = disk.write(units)
    assert_holds(disk, file, units)
    disk.close()


@pytest.mark.parametrize("size", [300, 4096, 100_000])
@pytest.mark.parametrize("unsupported", ["nowhere", "in the file system", "for these lengths", "in the system"])
def test_files_that_nobody_reads_soon_hold_what_was_written(
    size: int, unsupported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, fcntl_, direct, lengths = os.write, fcntl.fcntl, os.O_DIRECT, list[int]()

    def writes_a_little(file: int, data: memoryview) -> int:
        if fcntl_(file, fcntl.F_GETFL) & direct:
            if unsupported == "for these lengths":
                raise OSError(errno.EINVAL, "this file system wants larger blocks")
            lengths.append(len(data))
            return write(file, data[: max(4096, len(data) // 3 // 4096 * 4096)])
        return write(file, data[: max(1, len(data) // 2)])

    def controls(file: int, command: int, flags: int = 0) -> int:
        if unsupported == "in the file system" and command == fcntl.F_SETFL and flags & direct:
            raise OSError(errno.EINVAL, "this file system has no direct writes")
        return fcntl_(file, command, flags)

    monkeypatch.setattr("os.write", writes_a_little)
    monkeypatch.setattr("fcntl.fcntl", controls)
    if unsupported == "in the system":
        monkeypatch.setattr("tenuto.memory.tiers.file_writes._DIRECT", 0)
    units = random_units(size)
    disk = UnitFiles(tmp_path, 10**7)
    file = disk.write(units, cached=False)
    assert_holds(disk, file, units)
    disk.close()
    assert bool(lengths) == (unsupported == "nowhere" and has_direct_writes(tmp_path))
    assert all(length % 4096 == 0 for length in lengths)


def has_direct_writes(directory: Path) -> bool:
    try:
        os.close(os.open(directory / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_full_disk_is_not_taken_for_one_without_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("os.write", fails)
    disk = UnitFiles(tmp_path, 10**7)
    with pytest.raises(DiskFailed, match="no room"):
        disk.write(random_units(5000), cached=False)
    assert not disk.files()
    disk.close()


def random_units(size: int) -> dict[int, list[NamedUnit]]:
    """Returns twenty units of `size` random bytes for each of two groups."""
    draw = np.random.default_rng(0)
    ranges = [(at, at + 1) for at in range(20)]
    return {
        group: [
            NamedUnit(content, draw.integers(0, 256, size, np.uint8))
            for content in named(Scope(str(group)), range(20), *ranges)
        ]
        for group in (0, 2)
    }


def assert_holds(disk: UnitFiles, file: UnitFile, units: Mapping[int, Sequence[NamedUnit]]) -> None:
    """Fails unless the file has the units, in whatever order its rows are read."""
    for rows in ([3], [0, 1, 2, 19], [7, 5, 6, 7, 9, 2], list(range(20))):
        found = disk.read(file, {0: rows, 2: rows})
        for group, same in found.items():
            assert [each.content for each in same] == [units[group][row].content for row in rows]
            assert all((each.data == units[group][row].data).all() for each, row in zip(same, rows, strict=True))


def named(scope: Scope, tokens: Sequence[int], *ranges: tuple[int, int]) -> list[Content]:
    return Digests(scope).contents(array("i", tokens), ranges)


def test_a_content_name_depends_on_tenant_adapter_position_and_tokens() -> None:
    tokens = list(range(12))
    (first, second) = named(Scope("t"), tokens, (0, 4), (4, 7))
    (shorter,) = named(Scope("t"), tokens, (4, 6))
    assert second.covers(shorter)
    assert not shorter.covers(second)
    for scope, others, at in (
        (Scope("u"), tokens, (4, 6)),
        (Scope("t", "a"), tokens, (4, 6)),
        (Scope("", "t"), tokens, (4, 6)),
        (Scope("t"), tokens[1:] + tokens[:1], (4, 6)),
        (Scope("t"), tokens, (8, 9)),
    ):
        assert not second.covers(named(scope, others, at)[0])
    assert not first.covers(second)
    assert type(first).named(first.name) == first


@given(st.data())
def test_digests_that_are_kept_name_contents_as_new_ones_do(data: st.DataObject) -> None:
    scope, history, kept = Scope("t"), array("i"), Digests(Scope("t"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenuto.memory.tiers.contents.SPACING", 4)
        for _ in range(data.draw(st.integers(1, 8))):
            history.extend(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12)))
            cuts = sorted(data.draw(st.lists(st.integers(0, len(history)), min_size=2, max_size=6)))
            ranges = list(pairwise(cuts))
            assert kept.contents(history, ranges) == Digests(scope).contents(history, ranges)
            length = data.draw(st.integers(0, len(history)))
            del history[length:]
            kept.cut(length)


# -- files that are not unit files


@pytest.mark.parametrize("make_it", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_anything_but_a_regular_file_is_refused_without_waiting(
    make_it: Callable[[Path], None], tmp_path: Path
) -> None:
    stage = make(tmp_path)
    park_all(stage, "a")
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    path.unlink()
    make_it(path)
    assert goes_on(stage, "a") == 0
    assert parking(stage).tiers.failures == {"read": 1}
    stage.engine.end(keep=True)
    index = tmp_path / INDEX
    index.unlink(missing_ok=True)
    make_it(index)
    stage = make(tmp_path)
    stage.engine.sessions.recover()
    assert stage.engine.snapshots.counts["unreadable"] == 1


def test_no_memory_is_allocated_for_a_file_that_claims_to_be_huge(tmp_path: Path) -> None:
    stage = make(tmp_path)
    park_all(stage, "a", "b")
    first, second = tmp_path.glob(f"*{SUFFIX}")
    os.truncate(first, 2**42)
    os.truncate(second, 2**42)
    with second.open("r+b") as file:
        file.write((2**41).to_bytes(8, "little"))
    assert sorted(goes_on(stage, name) for name in "ab") == [0, 31]
    assert parking(stage).tiers.failures == {"read": 1}


# -- room


def test_a_full_disk_deletes_the_least_recently_used_memory(tmp_path: Path) -> None:
    stage = make(tmp_path, budget=47 * UNIT)
    names = [f"s{i}" for i in range(10)]
    park_all(stage, *names)  # of 8 pages each
    assert parked(stage) == names[5:]
    for name in (names[5], names[6], names[5]):
        assert goes_on(stage, name) > 0
        park(stage, name)
    stage.open("new")
    stage.say("new", count_from(50, 60), 2)
    stage.play()
    park(stage, "new")
    assert parked(stage) == [names[5], names[6], names[9], "new"]
    assert parking(stage).tiers.moved["nowhere"] > 0
    assert not parking(stage).tiers.failures
    stage.engine.audit()


def test_a_session_too_large_for_the_disk_evicts_no_other(tmp_path: Path) -> None:
    stage = make(tmp_path, budget=20 * UNIT)
    park_all(stage, "a", "b")
    park_all(stage, "large", tokens=100)
    assert parked(stage) == ["a", "b"]
    assert parking(stage).tiers.failures == {"full": 1}
    assert goes_on(stage, "large") == 0


def test_memory_without_room_beside_unfinished_writes_counts_as_busy_not_full(tmp_path: Path) -> None:
    copies = ByHand()
    stage = make(tmp_path, budget=20 * UNIT, carrier=copies)
    park_all(stage, "a", "b", "c")  # of 8 pages each; none of the writes has ended
    assert parked(stage) == ["a", "b"]
    assert parking(stage).tiers.failures == {"busy": 1}
    copies.finish()
    park_all(stage, "d")
    assert parked(stage) == ["b", "d"]
    assert parking(stage).tiers.failures == {"busy": 1}


def test_a_full_file_system_deletes_the_least_recently_used_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make(tmp_path)
    park_all(stage, "a", "b", "c")

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("tenuto.memory.tiers.unit_files.open_private", no_room)
        full.setattr(UnitFiles, "_lacks", lambda *_: True)
        park_all(stage, "d")
    assert parked(stage) == ["b", "c"]
    assert parking(stage).tiers.failures == {"full": 1}
    park_all(stage, "e")
    assert parked(stage) == ["b", "c", "e"]
    stage.engine.audit()


def test_a_snapshot_on_a_small_disk_keeps_the_most_recently_used_sessions(tmp_path: Path) -> None:
    stage = make(tmp_path, budget=24 * UNIT)
    park_all(stage, "a", "b", "c")
    stage.clock.advance(1.0)
    for number, name in enumerate(("d", "e")):
        stage.open(name)
        stage.say(name, count_from(10 + number, 30), 2)
        stage.play()
        stage.clock.advance(1.0)
    saved = [session.saved() for session in stage.engine.registry]
    stage.engine.sessions.save()
    assert stage.engine.snapshots.counts == {"saved": 3}
    stage.engine.end(keep=True)
    stage = make(tmp_path, budget=24 * UNIT)
    for each in saved:
        stage.engine.sessions.restore(each)
    stage.engine.sessions.recover()
    assert set(parked(stage)) > {"d", "e"}
    assert [goes_on(stage, name) for name in ("d", "e")] == [31, 31]


def test_a_smaller_tier_keeps_the_most_recently_used_memory(tmp_path: Path) -> None:
    stage = make(tmp_path)
    park_all(stage, "a", "b", "c")
    saved = save_as_used(stage, 3.0, 1.0, 2.0)
    stage.engine.end(keep=True)
    stage = make(tmp_path, budget=20 * UNIT)
    recover_as_used(stage, saved)
    assert parked(stage) == ["a", "c"]
    files_become(tmp_path, SUFFIX, 2)
    stage.engine.audit()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked to read ahead")
def test_the_state_of_the_sessions_used_last_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = make(tmp_path)
    park_all(stage, "a", "b", "c")
    saved = save_as_used(stage, 3.0, 1.0, 2.0)
    records = {name: parking(stage).saves.record(("", name)) for name in "abc"}
    files = {name: {unit.file for unit in present(record)} for name, record in records.items()}
    stage.engine.end(keep=True)
    asked: list[int] = []
    advise = os.posix_fadvise

    def noting(file: int, *arguments: int) -> None:
        asked.append(os.fstat(file).st_ino)
        advise(file, *arguments)

    monkeypatch.setattr("os.posix_fadvise", noting)
    recent = {present(file).name for name in "ac" for file in files[name]}
    inodes = {(tmp_path / name).stat().st_ino for name in recent}
    size = sum(present(file).size for name in "ac" for file in files[name])
    monkeypatch.setattr("tenuto.memory.tiers.unit_files.READ_AHEAD", size)
    stage = make(tmp_path)
    recover_as_used(stage, saved)
    stage.engine.end(keep=True)
    assert set(asked) == inodes


# -- rates


def test_one_slow_copy_does_not_rule_out_a_tier() -> None:
    rates = Rates()
    rates.note("compute", 1, 1.0)
    for seconds in (0.5, 0.5, 1000.0, 0.5):
        rates.note("disk", 1, seconds)
        assert rates.worth("disk", 1, 1)
    for _ in range(rates.KEPT):
        rates.note("disk", 1, 1000.0)
    assert not rates.worth("disk", 1, 1)


def test_a_tier_that_was_ruled_out_is_measured_again(tmp_path: Path) -> None:
    stage = make(tmp_path, (FULL, STATE))
    rates = parking(stage).tiers.rates
    for _ in range(rates.KEPT):
        rates.note("compute", 1, 1.0)
        rates.note("disk", 1, 1000.0)
    restored = []
    park_all(stage, "s")
    for _ in range(rates.RETRIED * rates.KEPT):
        cached = goes_on(stage, "s")
        restored.append(cached > 0)
        if cached:
            rates.note("disk", 1, 1e-6)  # it is fast by now
        if len(stage.engine.registry.get("s").history) > 150:
            stage.engine.sessions.rewind("s", position=30)
        park(stage, "s")
        if restored[-3:] == [True] * 3:
            break
    assert restored[-3:] == [True] * 3
    assert restored[: rates.RETRIED - 1] == [False] * (rates.RETRIED - 1)
