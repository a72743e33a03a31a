"""Threads copy parked memory to the device while the engine runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tenuto.base.clock import SystemClock
from tenuto.base.config import EngineConfig
from tenuto.base.options import TurnParams
from tenuto.engine.engine import Engine
from tenuto.engine.thread.loop import EngineLoop
from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.disk import UnitFile
from tenuto.memory.tiers.unit_files import UnitFiles
from tests.engine.stage import FULL, PAGE, VOCABULARY, Recorder, Stage, continuation, count_from
from tests.tiered import parking_in, unit_files_in


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
    assert engine.restores.restored == 1


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
    for path in unit_files_in(engine, tmp_path):
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
