"""Idle sessions that yield leave the device, and are restored when their turns start, or recomputed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tenuto.base.errors import ConfigError
from tenuto.base.groups import Kind
from tenuto.base.views import Transition
from tenuto.engine.parking import Parking
from tenuto.memory.tiers.unit_files import SUFFIX, UnitFiles
from tests.engine.stage import FULL, PAGE, STATE, Stage, continuation, count_from, every_mix, every_overlap
from tests.eventually import files_become
from tests.present import present
from tests.tiered import parking_in, unit_files_in

HOST = 10**6


def make(mix: tuple[Kind, ...] = (FULL,), **options: Any) -> Stage:
    given = {"units": 60, "token_budget": 24, "host_tier": HOST, **options}
    return Stage(mix, **given)


def units_of(mix: tuple[Kind, ...]) -> int:
    """Returns so few units that the sessions of `crowd` do not fit."""
    return 60 if FULL in mix else 6 if mix == (STATE,) else 24


def parking(stage: Stage) -> Parking:
    return parking_in(stage.engine)


def crowd(stage: Stage, count: int = 8, tokens: int = 60) -> list[str]:
    """Makes more sessions than fit the device."""
    names = [f"{'abcdefghijkl'[i]}{'x' * i}" for i in range(count)]
    for name in names:
        stage.committed(name, tokens)
        stage.engine.audit()
    return names


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
def test_sessions_that_yield_are_restored_with_their_state(mix, overlap: int) -> None:
    stage = make(mix, overlap=overlap, units=units_of(mix))
    names = crowd(stage)
    assert parking(stage).parked > 0
    for name in names * 2:
        length = len(stage.engine.registry.get(name).history)
        assert goes_on(stage, name, 5, 6) == length - 1
    assert stage.engine.restores.restored > 0
    assert not parking(stage).recomputed


@every_mix
def test_units_shared_by_two_sessions_are_kept_once_and_restored_once(mix) -> None:
    stage = make(mix, units=70)
    parent = stage.committed("parent", 80)
    stage.engine.sessions.fork("parent", child="child")
    held = [pool.leased for pool in stage.engine.memory.pools]
    for session in (parent, stage.engine.registry.get("child")):
        stage.engine.pressure.drop(session, "pressure")
    tiers = parking(stage).tiers
    assert len(tiers) == 2
    assert tiers.moved["host"] <= sum(held)
    goes_on(stage, "parent", 1)
    once = tiers.moved["device"]
    goes_on(stage, "child", 2)
    assert once > 0
    assert tiers.moved["device"] - once <= len(mix)  # a last page, or a state that is gone


@every_mix
def test_a_restored_session_that_continued_copies_only_its_new_units(mix) -> None:
    stage = make(mix, units=units_of(mix))
    names = crowd(stage)
    for _ in range(3):
        for name in names:
            goes_on(stage, name, 1)
    tiers = parking(stage).tiers
    if mix == (FULL,):
        assert tiers.moved["host"] < 8 * 70 / PAGE + 3 * 8 * 4


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[UnitFiles]:
    files = UnitFiles(tmp_path / "tier", 10**7)
    yield files
    files.close()


@every_mix
@pytest.mark.parametrize("part", [0.0, 0.5])
def test_memory_beyond_the_hosts_goes_to_files(mix, part: float, disk: UnitFiles, tmp_path: Path) -> None:
    host = int(part * {(FULL,): 6000, (STATE,): 80}.get(mix, 1000))
    stage = make(mix, units=units_of(mix), host_tier=host, disk=disk)
    names = crowd(stage)
    tiers = parking(stage).tiers
    assert tiers.moved["disk"] > 0
    assert tiers.copies.host_used <= host
    for name in names:
        length = len(stage.engine.registry.get(name).history)
        assert goes_on(stage, name, 5, 6) == length - 1
    for name in names:
        stage.engine.sessions.close(name)
    assert len(tiers) == tiers.copies.host_used == tiers.copies.disk_used == 0
    files_become(tmp_path / "tier", SUFFIX, 0)


@every_mix
@pytest.mark.parametrize("harm", ["damaged", "cut", "gone", "other version", "larger units"])
def test_damaged_files_cost_only_time(mix, harm: str, disk: UnitFiles, tmp_path: Path) -> None:
    stage = make(mix, units=units_of(mix), host_tier=0, disk=disk)
    names = crowd(stage)
    for path in unit_files_in(stage.engine, tmp_path / "tier"):
        if harm == "damaged":
            changed = bytearray(path.read_bytes())
            changed[-5] ^= 1
            path.write_bytes(changed)
        elif harm == "cut":
            path.write_bytes(path.read_bytes()[:-7])
        elif harm == "gone":
            path.unlink()
        elif harm == "larger units":  # the header's claim allocates no memory
            content = path.read_bytes()
            end = 8 + int.from_bytes(content[:8], "little")
            header = re.sub(rb'(?<="shape":\[)(\d+),\d+', rb"\1,9" + b"0" * 15, content[8:end])
            path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
        else:
            path.write_bytes(path.read_bytes().replace(b'"version":"2"', b'"version":"9"'))
    for name in names:
        goes_on(stage, name, 5, 6)
    assert parking(stage).tiers.failures["checksum" if harm == "damaged" else "read"] > 0
    assert parking(stage).recomputed["unreadable"] > 0


@every_mix
def test_copies_that_fail_cost_only_time(mix) -> None:
    stage = make(mix, units=units_of(mix))
    asked = iter(range(10**9))
    stage.executor._copy_fails = lambda: next(asked) % 3 == 1
    names = crowd(stage)
    for name in names * 2:
        goes_on(stage, name, 5, 6)
    assert parking(stage).tiers.failures["copy"] > 1


def test_a_directory_is_used_by_one_process_at_a_time_and_left_empty(tmp_path: Path) -> None:
    (tmp_path / f"3{SUFFIX}").write_bytes(b"left by a process that was killed")
    files = UnitFiles(tmp_path, 100)
    files.take_over([])
    assert not list(tmp_path.glob(f"*{SUFFIX}"))
    with pytest.raises(ConfigError, match="in use by another process"):
        UnitFiles(tmp_path, 100)
    files.close()
    UnitFiles(tmp_path, 100).close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        UnitFiles(tmp_path / "file", 100)


@every_mix
def test_an_aborted_turn_leaves_its_session_parked_or_in_memory_with_its_state(mix) -> None:
    stage = make(mix, units=units_of(mix))
    names = crowd(stage)
    for name in names:
        stage.say(name, count_from(3, 20), 20)
        stage.step()
        stage.engine.turns.abort(name)
    for name in names:
        length = len(stage.engine.registry.get(name).history)
        assert goes_on(stage, name, 5) == length - 1


def test_a_rewound_session_keeps_the_parked_memory_that_is_still_valid() -> None:
    stage = make()
    names = crowd(stage)
    parked = next(name for name in names if not stage.engine.registry.get(name).memory.computed)
    stage.engine.sessions.rewind(parked, position=33)
    assert goes_on(stage, parked, 700, 701) == 32
    stage = make((STATE,), units=6)
    names = crowd(stage)
    parked = next(name for name in names if not stage.engine.registry.get(name).memory.computed)
    stage.engine.sessions.rewind(parked, position=33)
    assert goes_on(stage, parked, 700, 701) == 0


@every_mix
def test_a_session_about_to_expire_is_parked_first_and_closed_later(mix) -> None:
    stage = make(mix)
    stage.committed("s", 50, ttl=100.0)
    stage.committed("busy", 50, ttl=100.0)
    held = [pool.leased for pool in stage.engine.memory.pools]
    stage.clock.advance(49.0)
    stage.step()
    assert [pool.leased for pool in stage.engine.memory.pools] == held
    goes_on(stage, "busy", 1)
    stage.clock.advance(1.0)
    stage.step()
    session = stage.engine.registry.get("s")
    assert (session.memory.computed, len(parking(stage))) == (0, 1)
    assert goes_on(stage, "s", 2) == 55  # it is unchanged
    assert stage.engine.transitions[Transition("park")] == 1
    stage.clock.advance(60.0)
    stage.step()
    assert len(parking(stage)) == 2
    stage.clock.advance(40.0)
    stage.step()
    assert not len(stage.engine.registry)
    assert parking(stage).tiers.copies.host_used == 0
    stage = make(mix, host_tier=0)
    stage.committed("s", 50, ttl=100.0)
    stage.clock.advance(99.0)
    stage.step()
    assert stage.engine.registry.get("s").memory.computed == 55  # there is no tier to park it in


def test_a_fork_of_a_parked_session_is_also_parked() -> None:
    stage = make()
    parked = next(name for name in crowd(stage) if not stage.engine.registry.get(name).memory.computed)
    length = len(stage.engine.registry.get(parked).history)
    stage.engine.sessions.fork(parked, child="whole")
    stage.engine.sessions.fork(parked, position=41, child="part")
    stage.engine.sessions.close(parked)
    assert goes_on(stage, "whole", 7) == length - 1
    assert goes_on(stage, "part", 8) == 40


def test_flushed_memory_is_not_restored() -> None:
    stage = make()
    names = crowd(stage)
    assert len(parking(stage)) > 0
    for name in names:
        stage.engine.sessions.drop(name)
    assert len(parking(stage)) == 0
    assert goes_on(stage, names[0], 5) == 0


def test_a_tier_is_not_used_where_recomputing_is_faster() -> None:
    stage = make()
    rates = parking(stage).tiers.rates
    rates.note("compute", 1000, 1.0)
    rates.note("host", 1000, 1000.0)
    crowd(stage)
    assert parking(stage).parked == 0
    for _ in range(rates.KEPT):
        rates.note("compute", 1, 1e9)
    crowd_of = [f"z{'y' * i}" for i in range(8)]
    for name in crowd_of:
        stage.committed(name, 60)
    assert parking(stage).parked > 0
