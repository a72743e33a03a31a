"""Far more sessions than the device holds: all are answered correctly, in order, and memory adds up.

`python -m tests.engine.test_many_sessions 10000` runs that many."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tenuto.memory.tiers.unit_files import UnitFiles
from tests.engine.stage import PAGE, Stage, continuation
from tests.tiered import parking_in

SESSIONS = 500
FIT = 50
TOKENS = 24
OVERTAKEN = 0
"""Later turns of the same priority that may start before a waiting one."""


def test_far_more_sessions_than_the_device_holds_are_answered_correctly(tmp_path: Path) -> None:
    over_the_device(SESSIONS, tmp_path)


def over_the_device(sessions: int, directory: Path) -> None:
    """Makes `sessions` of `TOKENS` tokens on device memory for `FIT`; half of the rest fits host memory, the remainder
    is on disk."""
    disk = UnitFiles(directory, 10**9)
    stage = Stage(
        units=FIT * (TOKENS + 10) // PAGE,
        max_running=8,
        token_budget=64,
        max_sessions=sessions,
        recount=False,
        host_tier=sessions * (TOKENS + 4) * 16 // 2,
        disk=disk,
        prefix_cache=True,
    )
    rng, said = Random(5), dict[str, list[int]]()
    names = [str(number) for number in range(sessions)]
    started: list[int] = []
    for turns in range(2):
        rng.shuffle(names)
        for first in range(0, sessions, 200):
            batch = names[first : first + 200]
            asked = {}
            for name in batch:
                if not turns:
                    stage.open(name)
                tokens = [rng.randrange(900) for _ in range(TOKENS // (1 + turns))]
                asked[name] = tokens, stage.say(name, tokens, 3)
            waiting = [turn for _, turn in asked.values()]
            while not stage.engine.idle:
                stage.step()
                started += [turn.number for turn in waiting if turn.started]
                waiting = [turn for turn in waiting if not turn.started]
            for name, (tokens, turn) in asked.items():
                history = [*said.get(name, []), *tokens]
                assert list(turn.output) == continuation(history, 3)
                said[name] = [*history, *turn.output]
        stage.engine.audit()
    late = max(place - sum(other < number for other in started[:place]) for place, number in enumerate(started))
    assert late <= OVERTAKEN
    parking = parking_in(stage.engine)
    assert stage.engine.restores.restored >= sessions - FIT
    assert not parking.recomputed
    assert parking.tiers.moved["disk"] > 0
    for name in names:
        stage.engine.sessions.close(name)
    assert parking.tiers.copies.host_used == parking.tiers.copies.disk_used == 0
    stage.engine.sessions.drop()
    stage.engine.audit()
    disk.close()


if __name__ == "__main__":
    with TemporaryDirectory() as directory:
        over_the_device(int(sys.argv[1]), Path(directory))
