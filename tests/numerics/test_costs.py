"""The cost of turns on the default model, in tokens computed: a turn pays for its new tokens, whatever came before it.

The last token of a history is not computed until something follows it, so a turn that appends `i` tokens and samples
`o` computes the history's last token, the `i`, and all but the last of the `o`: `i + o` tokens.
"""

from collections.abc import Iterator

import pytest

from tenuto.base.config import DEFAULT_MODEL, EngineConfig, cache_dir
from tenuto.base.options import TurnParams
from tenuto.base.turns import TurnResult, TurnState
from tenuto.engine.engine import Engine
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.models.store import resolve
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.numerics.real import finish, real_engine

HISTORY, PAGE, PAGES, BUDGET = 90, 16, 40, 16
QUESTION = range(1000, 1011)
OUTPUT = 5
NEW = len(QUESTION) + OUTPUT
ANSWER = TurnParams(max_new_tokens=OUTPUT, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """On the kernels that a server would use here."""
    executor = load_executor(resolve(DEFAULT_MODEL, cache_dir()), ExecutorOptions(PAGE, cache=cache_dir()))
    config = EngineConfig(context_length=400, max_running=4, token_budget=BUDGET, audit_every=1)
    with real_engine(executor.forward, config, units=(PAGES,)) as engine:
        yield engine


@pytest.fixture
def session(engine: Engine, licence_tokens: list[int]) -> Session:
    """A session with 90 committed tokens, the last 5 of them sampled."""
    session = engine.sessions.open()
    turn = finish(engine, engine.turns.submit(session.id, licence_tokens[: HISTORY - OUTPUT], ANSWER))
    assert result(turn).usage.computed == HISTORY - 1
    return session


def result(turn: Turn) -> TurnResult:
    assert turn.result is not None
    return turn.result


def ask(engine: Engine, session: Session) -> int:
    """Returns the number of tokens computed by a turn that appends the question and samples the answer."""
    turn = finish(engine, engine.turns.submit(session.id, QUESTION, ANSWER))
    assert len(turn.output) == OUTPUT
    usage = result(turn).usage
    assert usage.computed == usage.prompt - usage.cached + OUTPUT - 1
    return usage.computed


def free_pages(engine: Engine) -> int:
    return int(engine.memory.free()[0])


def step_until_drafted(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def test_a_turn_computes_its_input_and_its_output_once(engine: Engine, session: Session) -> None:
    assert ask(engine, session) == NEW
    assert ask(engine, session) == NEW
    turn = finish(engine, engine.turns.submit(session.id, (), ANSWER))
    assert result(turn).usage.computed == OUTPUT, "continuing appends nothing"


def test_a_draft_is_computed_while_it_is_typed_and_recomputed_only_from_its_change(
    engine: Engine, session: Session, licence_tokens: list[int]
) -> None:
    text = licence_tokens[200:260]
    draft = engine.turns.draft(session.id, text)
    step_until_drafted(engine)
    assert draft.computed_tokens == 60, "the history's last token and all but the draft's last"
    engine.turns.draft(session.id, text[:40] + text[:20])
    step_until_drafted(engine)
    assert draft.computed_tokens == 60 + 19
    engine.turns.draft(session.id, text[:40])
    step_until_drafted(engine)
    assert draft.computed_tokens == 60 + 19, "deleting costs nothing"
    turn = finish(engine, engine.turns.submit(session.id, [*text[:40], *QUESTION], ANSWER))
    assert turn is draft
    assert result(turn).usage.computed == 60 + 19 + NEW
    assert result(turn).usage.cached == HISTORY + 40 - 1


def test_a_fork_copies_no_state_and_computes_no_history(engine: Engine, session: Session) -> None:
    ask(engine, session)
    before = free_pages(engine)
    children = [engine.sessions.fork(session.id) for _ in range(5)] + [engine.sessions.fork(session.id, turn=1)]
    assert free_pages(engine) == before, "shared by count"
    assert [ask(engine, child) for child in children] == [NEW] * 6
    assert ask(engine, session) == NEW, "and the parent pays nothing for its children"
    answers = {tuple(s.history[-OUTPUT:]) for s in [session, *children[:5]]}
    assert len(answers) == 1


def test_a_fork_copies_at_most_one_page_and_only_at_its_first_write(engine: Engine, session: Session) -> None:
    child = engine.sessions.fork(session.id)
    before = free_pages(engine)
    ask(engine, child)
    assert (HISTORY - 1) % PAGE, "the shared page is partly used"
    pages = -(-(HISTORY + NEW - 1) // PAGE)
    assert before - free_pages(engine) == pages - (HISTORY - 1) // PAGE


def test_a_fork_beside_a_running_turn_pays_only_for_its_own_tokens(engine: Engine, session: Session) -> None:
    turn = engine.turns.submit(session.id, QUESTION, ANSWER)
    engine.step()
    child = engine.sessions.fork(session.id)
    assert ask(engine, child) == NEW
    assert result(finish(engine, turn)).usage.computed == NEW


@pytest.mark.parametrize("moment", ["drafting", "drafted", "queued", "mid-prefill", "mid-decode", "preempted"])
def test_after_an_abort_at_any_moment_the_next_turn_computes_only_its_own_tokens(
    engine: Engine, session: Session, licence_tokens: list[int], moment: str
) -> None:
    history, free = session.history[:], free_pages(engine)
    text = licence_tokens[300:340]
    if moment in ("drafting", "drafted"):
        turn = engine.turns.draft(session.id, text)
    else:
        turn = engine.turns.submit(session.id, text, ANSWER)
    if moment == "drafted":
        step_until_drafted(engine)
    elif moment == "mid-decode":
        while len(turn.output) < 2:
            engine.step()
    elif moment != "queued":
        engine.step()
        assert turn.state in (TurnState.RUNNING, TurnState.DRAFTING)
    if moment == "preempted":
        engine.pressure.preempt(turn)
    engine.turns.abort(session.id)
    assert session.history == history
    assert free_pages(engine) == free
    assert ask(engine, session) == NEW


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_a_barge_in_keeps_the_computed_tokens(engine: Engine, session: Session, keep: int) -> None:
    turn = engine.turns.submit(session.id, QUESTION, TurnParams(max_new_tokens=20, ignore_eos=True))
    while len(turn.output) < 4:
        engine.step()
    engine.turns.abort(session.id, keep=keep)
    assert len(session.history) == HISTORY + len(QUESTION) + keep
    assert ask(engine, session) == NEW


def test_regenerating_computes_only_the_output_and_rewinding_computes_nothing(engine: Engine, session: Session) -> None:
    ask(engine, session)
    again = finish(engine, engine.turns.regenerate(session.id, ANSWER))
    assert result(again).usage.computed == OUTPUT
    free = free_pages(engine)
    engine.sessions.rewind(session.id, turn=1)
    assert free_pages(engine) >= free
    assert ask(engine, session) == NEW


def test_a_preempted_turn_recomputes_its_own_tokens_and_no_history(engine: Engine, session: Session) -> None:
    turn = engine.turns.submit(session.id, QUESTION, ANSWER)
    while len(turn.output) < 3:
        engine.step()
    engine.pressure.preempt(turn)
    lost = len(QUESTION) + 3
    assert result(finish(engine, turn)).usage.computed == NEW + lost


def test_dropping_a_session_to_its_tokens_costs_one_pass_over_its_history(engine: Engine, session: Session) -> None:
    history = session.history[:]
    engine.sessions.drop(session.id)
    assert free_pages(engine) == PAGES
    assert ask(engine, session) == HISTORY - 1 + NEW
    assert session.history[:HISTORY] == history
    assert ask(engine, session) == NEW
