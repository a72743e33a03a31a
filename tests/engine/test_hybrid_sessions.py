"""Long sessions with windows and recurrent state: rewinds replay little, and memory matches the spec."""

from __future__ import annotations

import pytest

from tenuto.engine.thread.views import session_info
from tenuto.memory.memory import session_units
from tests.engine.stage import FULL, PAGE, SLIDING, STATE, WINDOW, Stage, count_from

INTERVAL, TURNS, GIVEN, SAID = 32, 300, 7, 6


@pytest.fixture(scope="module")
def long() -> Stage:
    """Makes a session of 300 turns, one of them of 300 tokens, with room for its checkpoints."""
    stage = Stage((FULL, SLIDING, STATE), units=2600, recount=False, context_length=5000, checkpoint_interval=INTERVAL)
    stage.open("long")
    for number in range(TURNS):
        stage.say("long", count_from(number, 300 if number == 40 else GIVEN), SAID)
        stage.play()
    return stage


@pytest.mark.parametrize("turns", [1, 10, 100])
@pytest.mark.parametrize("within", [0, 3], ids=["after a turn", "within a turn"])
def test_a_rewind_replays_at_most_the_spacing_of_checkpoints(long: Stage, turns: int, within: int) -> None:
    engine, child = long.engine, f"{turns} {within}"
    fork = engine.sessions.fork("long", child=child)
    kept = fork.records[TURNS - turns - 1].end + within
    engine.sessions.rewind(child, position=kept)
    before = sum(engine.counts.recomputed.values())
    computed = long.cost(lambda: long.say(child, [5, 6], 4))
    replayed = computed - (2 + 4)  # the history's last token is computed now, and the last sampled one is not
    assert replayed == sum(engine.counts.recomputed.values()) - before
    assert 0 <= replayed <= (INTERVAL if within else 0)
    engine.sessions.close(child)


def test_a_rewind_into_a_long_input_replays_at_most_the_spacing(long: Stage) -> None:
    engine = long.engine
    begin = engine.registry.get("long").records[39].end
    for i, position in enumerate(range(begin + 40, begin + 290, 35)):
        engine.sessions.fork("long", child=f"cut {i}")
        engine.sessions.rewind(f"cut {i}", position=position)
        assert 0 < long.cost(lambda i=i: long.say(f"cut {i}", [5, 6], 4)) - 6 <= INTERVAL  # type: ignore[misc]
        engine.sessions.close(f"cut {i}")


def test_required_memory_is_reported_apart_from_memory_that_only_saves_work() -> None:
    stage = Stage((FULL, SLIDING, STATE), units=400, context_length=400)
    session = stage.committed("s", 150, SAID)
    needed = [len(units) for units in session.memory.kept()]
    info = session_info(stage.engine, session)
    assert list(info.memory.values()) == needed
    assert info.cached["full0"] == 0 < info.cached["state2"]
    pools = stage.engine.audit().pools
    assert [pool.cached for pool in pools] == list(info.cached.values())
    assert [pool.leased - pool.cached for pool in pools] == needed
    assert pools[2].by_holder == {"checkpoint": 1, "cached": info.cached["state2"]}
    while stage.engine.memory.cache.evict():
        pass
    assert (session_info(stage.engine, session).memory, stage.engine.audit().pools[2].cached) == (info.memory, 0)


def test_parked_sessions_hold_exactly_the_memory_of_the_spec() -> None:
    """All pages of full attention, those of the last window, and one state slot; everything else is checkpoints that
    only save work and yield to any need. `test_families` checks the bytes of a unit."""
    stage = Stage((FULL, SLIDING, STATE), units=400, context_length=400)
    memory, lengths = stage.engine.memory, [3, 16, 30, 77, 150]
    for i, tokens in enumerate(lengths):
        stage.committed(f"s{i}", tokens, SAID)
    cached = {unit for checkpoint in memory.cache for unit in checkpoint.units_of(2)}
    assert len(cached) == memory.pools[2].leased - len(lengths) > 0
    while memory.cache.evict():
        pass
    computed = [tokens + SAID - 1 for tokens in lengths]
    pages = [-(-n // PAGE) for n in computed]
    left = [max(0, n - WINDOW + 1) // PAGE for n in computed]  # pages before the next token's window
    expected = [sum(pages), sum(pages) - sum(left), len(lengths)]
    assert [pool.leased for pool in memory.pools] == expected
    for group, held in zip(memory.spec.groups, expected, strict=True):
        assert held <= sum(session_units(group, PAGE, n) for n in computed)
    stage.engine.audit()
