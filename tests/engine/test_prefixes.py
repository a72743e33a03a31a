"""Memory of equal tokens is not computed again, no matter which session computed it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from tenuto.base.groups import Kind
from tenuto.base.turns import EndReason
from tenuto.engine.engine import Engine
from tenuto.session.prefixes import MAX_COMPARED, PrefixIndex
from tenuto.session.turn import Turn
from tests.engine.stage import (
    FULL,
    PAGE,
    PREFILL,
    SLIDING,
    STATE,
    Stage,
    continuation,
    count_from,
    every_mix,
    every_overlap,
)
from tests.present import present

COMMON = count_from(1, 120)


def make(mix: Sequence[Kind] = (FULL,), **options: Any) -> Stage:
    return Stage(mix, prefix_cache=True, **{"units": 200, "token_budget": 40, "checkpoint_interval": 8, **options})


def once(stage: Stage, tokens: Sequence[int], output: int = 3, tenant: str = "", **params: Any) -> Turn:
    """Runs a one-shot turn to its end."""
    session = stage.open(None, ephemeral=True, tenant=tenant)  # type: ignore[arg-type]
    turn = stage.say(session.id, tokens, output, tenant, **params)
    stage.play()
    stage.engine.audit()
    assert list(turn.output) == continuation(tokens, output)
    return turn


def cached(turn: Turn) -> int:
    return present(turn.result).usage.cached


@every_mix
@every_overlap
def test_two_requests_with_a_common_prompt_compute_it_once(mix, overlap: int) -> None:
    stage = make(mix, overlap=overlap)
    assert cached(once(stage, [*COMMON, 5])) == 0
    again = once(stage, [*COMMON, 6, 7])
    assert cached(again) >= (len(COMMON) if mix == (FULL,) else len(COMMON) - 8 - PAGE)
    assert stage.engine.memory.pools[0].free < 200  # memory that closed sessions left


def test_a_client_that_resends_its_history_computes_only_the_new_tokens() -> None:
    stage, history = make(), list(COMMON)
    for number in range(1, 6):
        history += [number, number]
        turn = once(stage, history)
        if number > 1:
            assert cached(turn) == len(history) - 2 - 1  # the last token of the last answer was not computed
        history += turn.output
    assert len(stage.engine.registry.prefixes) == 1  # each made the one before it superfluous


def test_a_session_starts_with_memory_of_another_open_session() -> None:
    stage = make()
    stage.committed("first", 60)
    stage.open("second")
    turn = stage.say("second", [*count_from(len("first"), 60), 9], 2)
    stage.play()
    assert cached(turn) == 60
    assert list(turn.output) == continuation([*count_from(len("first"), 60), 9], 2)
    stage.say("first", [1], 4)
    stage.say("second", [2], 4)
    stage.play()
    stage.engine.audit()


def test_a_session_that_lost_its_memory_finds_it_in_another_session() -> None:
    stage = make()
    stage.committed("first", 60)
    stage.engine.sessions.fork("first", child="second")
    stage.engine.sessions.drop("first")
    turn = stage.say("first", [1], 2)
    stage.play()
    assert cached(turn) >= 60


@pytest.mark.parametrize("mix", [(FULL,), (FULL, SLIDING, STATE)], ids=str)
def test_tenants_share_nothing(mix) -> None:
    stage = make(mix)
    once(stage, COMMON, tenant="a")
    assert cached(once(stage, COMMON, tenant="b")) == 0
    assert cached(once(stage, COMMON, tenant="a")) > 0


@every_mix
def test_an_aborted_turn_leaves_its_session_as_it_was(mix) -> None:
    stage = make(mix)
    once(stage, COMMON)
    session = stage.committed("s", 10)
    computed = session.memory.computed
    turn = stage.say("s", count_from(7, 30), 5)
    stage.step()
    stage.engine.turns.abort("s")
    assert session.memory.computed == computed
    fresh = stage.open("fresh")
    turn = stage.say("fresh", [*COMMON, 3], 5)
    stage.until(lambda: turn.started)
    stage.engine.turns.abort("fresh")
    assert (fresh.memory.computed, len(fresh.history)) == (0, 0)
    turn = stage.say("fresh", [*COMMON, 4], 2)
    stage.play()
    assert cached(turn) > 80
    stage.engine.audit()


def test_input_with_requested_log_probabilities_is_computed() -> None:
    stage = make()
    once(stage, COMMON)
    turn = once(stage, COMMON, input_logprobs=0)
    assert cached(turn) == 0
    assert len(turn.input_logprobs) == len(COMMON)


def test_an_append_that_is_entirely_in_memory_computes_nothing() -> None:
    stage = make()
    once(stage, COMMON)
    session = stage.open("s")
    plans = len(stage.executor.plans)
    turn = stage.engine.turns.submit("s", COMMON[:50], PREFILL)
    stage.play()
    assert present(turn.result).reason is EndReason.APPENDED
    assert stage.computed_since(plans) == 0
    assert session.memory.computed == 49
    answer = stage.say("s", [1], 3)
    stage.play()
    assert list(answer.output) == continuation([*COMMON[:50], 1], 3)


def test_closed_sessions_yield_first_least_recently_used_before_others() -> None:
    stage = make(units=60)  # of 4 tokens
    texts = [count_from(100 * i, 60) for i in range(3)]
    for text in texts:
        once(stage, text)
    once(stage, texts[0])
    idle = stage.committed("idle", 20)
    once(stage, count_from(900, 60))
    assert idle.memory.computed
    assert cached(once(stage, texts[0])) > 0
    assert stage.engine.pressure.yielded["prefix"] >= 1
    assert not stage.engine.pressure.yielded["idle"]


@every_mix
def test_closed_forks_without_units_of_their_own_are_not_kept(mix) -> None:
    """Known fault: all were kept. They held no units of their own, so pressure never dropped them one by one, and
    finally dropped all of them in one step."""
    stage, tokens = make(mix), count_from(len("s"), 60)
    session = stage.committed("s", 60)
    for position in (None, 40, 61, None):
        for _ in range(10):
            stage.engine.sessions.close(stage.engine.sessions.fork("s", position=position).id)
    stage.engine.audit()
    assert not stage.engine.registry.prefixes
    stage.engine.sessions.close("s")
    assert list(stage.engine.registry.prefixes) == [session]
    assert cached(once(stage, [*tokens, *continuation(tokens, 6), 9])) == 65


@every_mix
def test_one_of_several_identical_closed_sessions_is_kept(mix) -> None:
    stage, tokens = make(mix), count_from(len("s"), 60)
    stage.committed("s", 60)
    for name in ("one", "other"):
        stage.engine.sessions.fork("s", child=name)
    for name in ("s", "one", "other"):
        stage.engine.sessions.close(name)
        stage.engine.audit()
    assert [session.id for session in stage.engine.registry.prefixes] == ["other"]
    assert cached(once(stage, [*tokens, *continuation(tokens, 6), 9])) == 65


@every_mix
def test_a_closed_session_is_dropped_once_an_open_one_has_all_its_memory(mix) -> None:
    stage, tokens = make(mix), count_from(len("s"), 60)
    stage.committed("s", 60)
    stage.engine.sessions.close("s")
    stage.open("open")
    stage.say("open", [*tokens, *continuation(tokens, 6), 9], 3)
    assert len(stage.engine.registry.prefixes) == 1
    stage.play()
    stage.engine.audit()
    assert not stage.engine.registry.prefixes


def test_a_closed_session_that_is_resumable_where_others_are_not_is_kept() -> None:
    stage = make((FULL, STATE), checkpoint_interval=4096)
    same = count_from(5, 40)
    for name, more in (("long", 60), ("short", 0)):
        stage.open(name)
        stage.say(name, [*same, *count_from(77, more)], 2, input_logprobs=0)  # so it computes everything itself
        stage.play()
    stage.engine.sessions.close("short")
    assert [session.id for session in stage.engine.registry.prefixes] == ["short"]
    assert cached(once(stage, [*same, *continuation(same, 2), 9])) == 41


def test_a_closed_session_of_less_than_a_page_is_not_kept() -> None:
    stage = make()
    stage.committed("s", PAGE - 1, 1)
    stage.engine.sessions.close("s")
    assert not stage.engine.registry.prefixes
    assert stage.engine.memory.pools[0].free == 200


def test_closing_a_session_compares_it_with_a_few_of_those_with_the_same_beginning() -> None:
    stage = make((FULL, STATE), units=2000, checkpoint_interval=4096, max_sessions=200)
    for i in range(60):
        stage.open(f"s{i}")
        stage.say(f"s{i}", [*COMMON[:40], i, i], 1, input_logprobs=0)
    stage.play()
    index = stage.engine.prefixes
    before = index.compared
    for i in range(60):
        stage.engine.sessions.close(f"s{i}")
    assert len(stage.engine.registry.prefixes) == 60
    assert index.compared - before == 60 * MAX_COMPARED


def test_a_lookup_looks_for_few_pages_of_a_long_prompt() -> None:
    stage = make(units=2000, context_length=5000, token_budget=1000)
    known = list(stage.committed("s", 400 * PAGE).history)
    index, session = stage.engine.prefixes, stage.open("other")
    for common in (*range(0, 400 * PAGE, 37 * PAGE + 1), len(known)):
        before = index.looked
        index._hashes.pop(session, None)
        found = index.find(session, array("i", [*known[:common], *[9999] * 400]), 0)
        assert (found[1] if found is not None else 0) == (min(common, len(known) - 1) if common >= PAGE else 0)
        assert index.looked - before <= 2 * (common // PAGE + 2).bit_length() + 2


def test_a_draft_is_computed_although_closed_sessions_have_filled_memory() -> None:
    stage = make(units=40)
    for i in range(4):
        once(stage, count_from(100 * i, 50))
    stage.open("s")
    draft = stage.engine.turns.draft("s", count_from(900, 60))
    stage.play()
    assert present(draft.session.memory.turn).computed == 59


def test_closed_sessions_that_share_all_their_memory_yield_before_an_open_one() -> None:
    stage = make(units=60)
    idle = stage.committed("idle", 60)
    stage.committed("closed", 80)
    stage.engine.sessions.fork("closed", child="too")  # neither frees anything alone
    stage.engine.sessions.close("closed")
    stage.engine.sessions.close("too")
    once(stage, count_from(500, 120))
    assert idle.memory.computed > 0
    assert not stage.engine.pressure.yielded["idle"]


@pytest.mark.parametrize("mix", [(SLIDING,), (STATE,), (FULL, SLIDING, STATE)], ids=str)
def test_units_a_closed_session_shares_with_an_open_one_are_not_reclaimable(mix) -> None:
    stage = make(mix)
    stage.committed("open", 60)
    before = stage.engine.pressure.reclaimable().tolist()
    stage.engine.sessions.fork("open", child="closed")
    stage.engine.sessions.close("closed")
    assert stage.engine.pressure.reclaimable().tolist() == before
    stage.engine.sessions.close("open")
    held = [pool.leased for pool in stage.engine.memory.pools]
    assert stage.engine.pressure.reclaimable().tolist() == held  # the shared units, and their checkpoints


def test_a_flush_drops_the_memory_of_closed_sessions() -> None:
    stage = make()
    once(stage, COMMON)
    assert stage.engine.sessions.drop() == 1
    stage.step()
    assert stage.engine.memory.pools[0].free == 200
    assert cached(once(stage, COMMON)) == 0


def hashed(engine: Engine) -> int:
    return engine.prefixes.hashed


def test_every_full_page_is_hashed_once() -> None:
    stage = make()
    session = stage.open("s")
    for number in range(4):
        stage.say("s", count_from(number, 30), 7)
        stage.play()
    assert hashed(stage.engine) == (len(session.history) - 1) // PAGE
    before = hashed(stage.engine)
    turn = once(stage, [*session.history[:100], *count_from(3, 20)])
    assert hashed(stage.engine) - before == (turn.length - 1) // PAGE


def test_a_fork_hashes_only_its_own_pages() -> None:
    stage = make()
    stage.committed("s", 60)
    before = hashed(stage.engine)
    child = stage.engine.sessions.fork("s", child="child", position=50)
    assert hashed(stage.engine) == before
    stage.say("child", count_from(500, 30), 7)
    stage.play()
    anew = PrefixIndex(PAGE)
    anew.enter(child)
    assert stage.engine.prefixes._hashes[child][: len(anew._hashes[child])] == anew._hashes[child]


@every_mix
def test_colliding_hashes_cost_only_cache_hits(mix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenuto.session.prefixes._digest", lambda before, tokens: 0)
    stage = make(mix)
    for i in range(5):
        once(stage, count_from(10 * i, 40))
        once(stage, COMMON[: 20 + 9 * i])


def test_output_after_a_rewind_is_found_by_its_own_hashes() -> None:
    stage = make()
    session = stage.committed("s", 60)
    stage.engine.sessions.rewind("s", position=10)
    stage.say("s", count_from(500, 60), 2)
    stage.play()
    anew = PrefixIndex(PAGE)
    anew.enter(session)
    assert stage.engine.prefixes._hashes[session] == anew._hashes[session]
    turn = once(stage, [*count_from(len("s"), 60)[:10], *count_from(500, 60), 9])
    assert cached(turn) == 70


def test_nothing_remains_of_closed_sessions() -> None:
    stage = make()
    for i in range(20):
        name = f"s{i}"
        stage.committed(name, 20 + i)
        stage.engine.sessions.rewind(name, position=10)
        stage.engine.sessions.close(name)
    stage.engine.sessions.drop()
    index = stage.engine.prefixes
    assert isinstance(index, PrefixIndex)
    assert (len(index), index._owners, index._hashes) == (0, {}, {})


def test_memory_found_by_a_waiting_turn_does_not_become_its_sessions_history() -> None:
    stage = make(max_running=1)
    for name, tokens in (("short", COMMON[:8]), ("long", COMMON)):
        stage.open(name)
        stage.append(name, tokens)
        stage.play()
    stage.open("running")
    stage.say("running", [900], 30, priority=1)
    stage.step()
    turn = stage.say("short", [*COMMON[8:], 3], 3)
    stage.step()
    assert turn.session.memory.computed > len(turn.session.history)
    stage.engine.sessions.drop("long")
    stage.open("other")
    other = stage.say("other", [*COMMON[:8], *count_from(9, 20)], 3, priority=2)
    stage.play()
    assert list(other.output) == continuation([*COMMON[:8], *count_from(9, 20)], 3)
    assert list(turn.output) == continuation([*COMMON, 3], 3)


def test_a_waiting_turn_without_a_match_starts_with_memory_committed_meanwhile() -> None:
    stage = Stage(prefix_cache=True, max_running=1)
    opening = count_from(3, PAGE - 1)  # not yet a full page to match by
    stage.open("s")
    first = stage.say("s", opening, 30)
    stage.until(lambda: first.running)
    stage.open("late")
    late = stage.say("late", [*opening, *continuation(opening, 25)], 1)
    stage.play()
    assert present(late.result).usage.cached == PAGE - 1 + 25 - 1
