"""With overlap two steps are in flight: the next is submitted before the previous one is collected."""

from __future__ import annotations

import pytest

from tests.engine.stage import Stage, continuation, count_from, every_mix, every_overlap


def recorded(stage: Stage, patch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that records the calls to the executor from now on."""
    events: list[str] = []
    submit, collect = stage.executor.submit, stage.executor.collect

    def submitting(plan) -> None:
        events.append("submit")
        submit(plan)

    def collecting():
        events.append("collect")
        return collect()

    patch.setattr(stage.executor, "submit", submitting)
    patch.setattr(stage.executor, "collect", collecting)
    return events


@every_mix
def test_the_next_step_is_submitted_before_the_previous_one_is_collected(mix, monkeypatch) -> None:
    stage = Stage(mix, overlap=1)
    stage.open()
    events = recorded(stage, monkeypatch)
    stage.say("s", count_from(1, 40), 10)
    stage.step()
    assert events == ["submit"]
    for _ in range(8):
        stage.step()
    assert events == ["submit"] + ["submit", "collect"] * 8
    stage.play()
    assert events.count("submit") == events.count("collect")


def test_without_overlap_a_step_is_collected_before_the_next_is_submitted(monkeypatch) -> None:
    stage = Stage(overlap=0)
    stage.open()
    events = recorded(stage, monkeypatch)
    stage.say("s", count_from(1, 40), 10)
    stage.play()
    assert events == ["submit", "collect"] * len(stage.executor.plans)


@every_mix
@every_overlap
def test_a_stop_found_while_the_next_step_is_in_flight_drops_its_result(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.open()
    said = continuation(count_from(1, 20), 10)
    stop = said[6]
    turn = stage.say("s", count_from(1, 20), 10, stop_ids=(stop,))
    stage.play()
    kept = said[: said.index(stop) + 1]
    assert list(session.history) == [*count_from(1, 20), *kept]
    assert (turn.stop, session.memory.computed) == (stop, len(session.history) - 1)
    assert turn.computed_tokens == len(session.history) - 1 + overlap  # the step after the stop was in flight
    expected = continuation([*session.history, 7], 4)
    following = stage.say("s", [7], 4)
    stage.play()
    assert list(following.output) == expected


@every_mix
@every_overlap
def test_released_units_are_free_exactly_when_the_steps_then_in_flight_have_settled(mix, overlap) -> None:
    stage = Stage(mix, overlap=overlap)
    for name in ("a", "b"):
        stage.open(name)
        stage.say(name, count_from(len(name), 30), 60)
    for _ in range(12):
        stage.step()
    pools = stage.engine.memory.pools
    before = [pool.free for pool in pools]
    stage.engine.turns.abort("a")
    released = [pool.limbo for pool in pools]
    if overlap:
        assert [pool.free for pool in pools] == before
        assert all(released)
        stage.step()  # the step that was in flight settles; one that began after the abort is in flight
    assert [pool.limbo for pool in pools] == [0] * len(pools)
    assert all(now > then for now, then in zip([pool.free for pool in pools], before, strict=True))
    stage.engine.audit()


def test_a_released_unit_stays_in_limbo_until_every_step_then_in_flight_has_settled() -> None:
    stage = Stage()
    stage.committed("s", 40, 1)
    memory, pool = stage.engine.memory, stage.engine.memory.pools[0]
    free = pool.free
    memory.step_submitted()
    memory.step_submitted()
    stage.engine.sessions.drop("s")
    assert (pool.limbo, pool.free) == (10, free)
    memory.step_settled()
    assert (pool.limbo, pool.free) == (10, free)
    stage.engine.audit()
    memory.step_settled()
    assert (pool.limbo, pool.free) == (0, free + 10)


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_idle_engine_has_nothing_in_flight(overlap: int) -> None:
    stage = Stage(overlap=overlap)
    stage.committed()
    assert not len(stage.engine._flights)
    assert not stage.step().worked


@every_overlap
def test_turns_without_guesses_do_not_run_ahead_of_those_with_guesses(overlap: int) -> None:
    prompts = [count_from(1, 20), count_from(5, 20)]
    right = continuation(prompts[0], 40)
    stage = Stage(
        overlap=overlap,
        lookahead=3,
        guess=lambda turn, limit: right[len(turn.output) :][:limit] if turn.session.id == "guessed" else [],
    )
    for name in ("guessed", "plain"):
        stage.open(name)
    turns = [stage.say(name, prompt, 40) for name, prompt in zip(("guessed", "plain"), prompts, strict=True)]
    stage.until(lambda: turns[0].result is not None)
    assert turns[0].accepted >= 27
    assert len(turns[1].output) <= 15


@every_overlap
def test_as_many_guesses_are_computed_as_pay_by_the_time_that_steps_take(monkeypatch, overlap: int) -> None:
    said = continuation(count_from(1, 20), 90)
    stage = Stage(overlap=overlap, lookahead=7, guess=lambda turn, limit: said[len(turn.output) :][:limit])
    collect, plans = stage.executor.collect, stage.executor.plans

    def collecting():
        stage.clock.advance(0.01 * len(plans[-1].tokens) ** 2)  # more than they save
        return collect()

    monkeypatch.setattr(stage.executor, "collect", collecting)
    stage.open()
    turn = stage.say("s", count_from(1, 20), 90)
    stage.play()
    assert turn.output.tolist() == said
    assert sum(len(plan.tokens) > 1 for plan in plans[20:]) < 20
