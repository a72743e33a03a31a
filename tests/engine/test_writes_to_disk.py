"""Parked memory is written to disk while steps run: a write that fails costs only time, and no session loses memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.disk import DiskFailed, UnitFile
from tenuto.memory.tiers.moves import Write
from tenuto.memory.tiers.unit_files import SUFFIX, UnitFiles
from tests.engine.slow import HISTORY, Slow
from tests.engine.stage import every_mix
from tests.eventually import files_become
from tests.present import present


@every_mix
def test_steps_continue_while_a_session_is_written_to_disk(mix, tmp_path: Path) -> None:
    disk = UnitFiles(tmp_path, 10**7)
    slow = Slow(mix, host_tier=0, disk=disk)
    tiers, history = slow.parking.tiers, list(slow.engine.registry.get("s").history)
    assert (len(tiers.writes), tiers.copies.disk_used, tiers.moved["disk"]) == (1, 0, 0)
    slow.stage.committed("other", 20)
    slow.engine.audit()
    slow.parking.audit()
    assert tiers.copies.host_used > 0
    slow.copies.finish()
    slow.stage.step()
    slow.parking.audit()
    assert (len(tiers.writes), tiers.copies.host_used) == (0, 0)
    assert tiers.copies.disk_used > 0
    assert slow.ends(slow.come_back(), history) == HISTORY - 1
    slow.engine.end()


@every_mix
@pytest.mark.parametrize("fails", [False, True])
def test_a_session_is_restored_while_it_is_being_written(
    mix, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = UnitFiles(tmp_path, 10**7)
    if fails:
        monkeypatch.setattr(
            "tenuto.memory.tiers.unit_files.open_private", lambda *_: (tmp_path / "no" / "file").touch()
        )
    slow = Slow(mix, host_tier=0, disk=disk)
    history = list(slow.engine.registry.get("s").history)
    turn = slow.come_back()
    assert slow.ends(turn, history) == HISTORY - 1
    tiers = slow.parking.tiers
    slow.parking.audit()
    assert tiers.failures == ({"write": 1} if fails else {})
    assert tiers.copies.host_used == 0
    files_become(tmp_path, SUFFIX, 0 if fails else 1)
    slow.engine.sessions.close("s")
    assert (tiers.copies.disk_used, len(tiers)) == (0, 0)
    files_become(tmp_path, SUFFIX, 0)
    slow.engine.end()


def test_a_session_closed_while_it_is_being_written_leaves_no_file(tmp_path: Path) -> None:
    slow = Slow(host_tier=0, disk=UnitFiles(tmp_path, 10**7))
    slow.engine.sessions.close("s")
    slow.copies.finish()
    slow.stage.step()
    slow.parking.audit()
    tiers = slow.parking.tiers
    assert (tiers.copies.host_used, tiers.copies.disk_used) == (0, 0)
    files_become(tmp_path, SUFFIX, 0)
    slow.engine.end()


def test_unfinished_writes_to_disk_stay_within_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(host_tier=0, disk=UnitFiles(tmp_path, 10**7))
    tiers = slow.parking.tiers
    monkeypatch.setattr("tenuto.memory.tiers.writes.MAX_LEAVING", tiers.copies.host_used + 10)
    slow.stage.committed("other", 20)
    assert len(tiers.writes) == 1
    slow.engine.pressure.drop(slow.engine.registry.get("other"))
    assert len(tiers.writes) == 1  # the first has been waited for
    assert tiers.copies.disk_used > 0
    slow.parking.audit()
    slow.engine.end()


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

    def fails_once(units: Mapping[int, Sequence[NamedUnit]], *, cached: bool = True) -> UnitFile:
        tried.append(units)
        if len(tried) == 1:
            raise DiskFailed("write", "once")
        return write(units, cached=cached)

    monkeypatch.setattr(disk, "write", fails_once)
    monkeypatch.setattr("tenuto.memory.tiers.writes.MAX_LEAVING", tiers.copies.host_used + 1)
    engine.sessions.save()
    assert len(tried) > 1
    assert engine.snapshots.counts == {"saved": 1}
    engine.end(keep=True)


def broken(*_: Any, **__: Any) -> None:
    raise OSError(30, "Read-only file system")


def no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize("writing", [broken, no_memory])
def test_a_disk_that_can_neither_write_nor_delete_costs_only_time(writing, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tenuto.memory.tiers.unit_files.open_private", writing)
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
