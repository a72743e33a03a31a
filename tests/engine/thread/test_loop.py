"""The engine in its own thread: commands, events, idling, and its end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from random import Random

import pytest

from tenuto.base.clock import SystemClock
from tenuto.base.config import EngineConfig
from tenuto.base.errors import EngineStopped, InvalidRequest, InvariantError, NotFound, TenutoError
from tenuto.base.groups import GroupSpec, Kind
from tenuto.base.options import Policy, TurnParams
from tenuto.base.turns import Delta, EndReason
from tenuto.base.views import Transition
from tenuto.engine import auditor
from tenuto.engine.engine import Engine
from tenuto.engine.thread.loop import COMMANDS_SECONDS, EngineLoop
from tenuto.exec.witness import WitnessExecutor
from tenuto.session.turn import Turn
from tests.engine.thread import loops
from tests.eventually import eventually

VOCABULARY = 97
LONG = TurnParams(max_new_tokens=4000)
Event = Delta | TenutoError


def make_engine(late: Callable[[], bool] = lambda: False) -> Engine:
    executor = WitnessExecutor(4, [GroupSpec(Kind.FULL, 64)], VOCABULARY, verify=False, late=late)
    config = EngineConfig(context_length=5000, audit_every=50)
    return Engine(executor, (1300,), config, vocab_size=VOCABULARY, eos_ids=(), clock=SystemClock(), random=Random(0))


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    running = EngineLoop(make_engine())
    yield running
    running.close()


def events_of(events: SimpleQueue[Event]) -> list[Delta]:
    """Returns all events of a turn, up to its result."""
    got: list[Delta] = []
    while not got or got[-1].result is None:
        event = events.get(timeout=60)
        assert isinstance(event, Delta)
        got.append(event)
    return got


def begin(
    loop: EngineLoop, params: TurnParams, session_id: str = "s", tokens: tuple[int, ...] = (1, 2, 3)
) -> tuple[SimpleQueue[Event], Future[Turn]]:
    events: SimpleQueue[Event] = SimpleQueue()
    return events, loops.start(loop, lambda engine: engine.turns.submit(session_id, tokens, params), events.put)


def test_a_turn_reports_its_tokens_and_finally_its_result(loop: EngineLoop) -> None:
    loop.call(lambda engine: engine.sessions.open("s")).result()
    events, started = begin(loop, TurnParams(max_new_tokens=20))
    tokens: list[int] = []
    while True:
        event = events.get(timeout=60)
        assert isinstance(event, Delta)
        tokens += event.tokens
        assert event.delivered == len(tokens)
        if event.result is not None:
            break
    assert event.result.reason is EndReason.LENGTH
    assert tokens == list(started.result().output)
    assert events.empty()


def test_a_refused_turn_reports_its_error_to_caller_and_subscriber(loop: EngineLoop) -> None:
    events, started = begin(loop, LONG, "nobody")
    with pytest.raises(NotFound):
        started.result()
    assert isinstance(events.get(timeout=60), NotFound)


def test_turns_of_many_threads_run_together(loop: EngineLoop) -> None:
    results: SimpleQueue[list[int]] = SimpleQueue()

    def talk(number: int) -> None:
        name = f"s{number}"
        loop.call(lambda engine: engine.sessions.open(name)).result()
        for _ in range(3):
            events, started = begin(loop, TurnParams(max_new_tokens=8), name, (number,))
            while (event := events.get(timeout=60)) is not None:
                assert isinstance(event, Delta)
                if event.result is not None:
                    break
            started.result()
        results.put(loop.call(lambda engine: list(engine.registry.get(name).history)).result())

    threads = [threading.Thread(target=talk, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(results.get_nowait()) for _ in threads] == [27] * 8
    loop.call(lambda engine: engine.audit()).result()


def test_aborting_ends_the_turn_at_once_and_twice_is_not_an_error(loop: EngineLoop) -> None:
    loop.call(lambda engine: engine.sessions.open("s")).result()
    events, started = begin(loop, LONG)
    assert isinstance(events.get(timeout=60), Delta)
    result = loops.abort(loop, started, keep=1).result()
    assert result is not None
    assert (result.reason, result.committed, result.kept) == (EndReason.ABORT, True, 1)
    assert loops.abort(loop, started).result() == result
    assert loop.call(lambda engine: len(engine.registry.get("s").history)).result() == 4


def test_an_idle_engine_still_closes_expired_sessions(loop: EngineLoop) -> None:
    loop.call(lambda engine: engine.sessions.open("s", Policy(ttl=0.05))).result()
    eventually(lambda: "s" not in loop.call(lambda engine: [s.id for s in engine.registry]).result())


def test_an_expired_session_closes_without_any_command() -> None:
    engine = make_engine()
    loop = EngineLoop(engine)
    loop.call(lambda e: e.sessions.open("s", Policy(ttl=0.05))).result()
    eventually(lambda: engine.transitions[Transition("expire")] == 1)
    loop.close()


def test_a_subscriber_that_fails_aborts_its_turn(loop: EngineLoop) -> None:
    loop.call(lambda engine: engine.sessions.open("s")).result()

    def gone(event: Event) -> None:
        raise RuntimeError("nobody is here")

    turn = loops.start(loop, lambda engine: engine.turns.submit("s", (1,), LONG), gone).result()
    eventually(lambda: turn.state.ended)
    assert loop.call(lambda engine: engine.registry.get("s").version).result() == 0


def test_a_mistake_in_a_command_affects_only_its_caller(loop: EngineLoop) -> None:
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda engine: 1 // 0).result()
    loop.call(lambda engine: engine.audit()).result()


def test_a_broken_invariant_stops_the_engine_and_is_reported_to_all_callers() -> None:
    release = threading.Event()
    engine = make_engine()
    loop = EngineLoop(engine)
    loop.call(lambda e: e.sessions.open("s")).result()
    events, _ = begin(loop, LONG)

    def leak(e: Engine) -> None:
        release.wait(60)
        e.memory.pools[0].counts[7] += 1
        e.audit()

    breaking = loop.call(leak)
    waiting = loop.call(lambda e: e.audit())
    release.set()
    for future in (breaking, waiting):
        with pytest.raises(EngineStopped, match="wrong count"):
            future.result()
    while isinstance(event := events.get(timeout=60), Delta):
        pass
    assert isinstance(event, EngineStopped)
    with pytest.raises(EngineStopped, match="wrong count"):
        loop.call(lambda e: e.audit())
    loop.close()


def test_a_broken_invariant_in_a_step_stops_the_engine_too() -> None:
    def broken() -> bool:
        raise InvariantError("told to break")

    loop = EngineLoop(make_engine(late=broken))
    loop.call(lambda e: e.sessions.open("s")).result()
    events, _ = begin(loop, LONG)
    assert isinstance(events.get(timeout=60), EngineStopped)
    with pytest.raises(EngineStopped, match="told to break"):
        begin(loop, LONG)
    loop.close()


def test_closing_twice_is_fine_and_later_commands_are_refused() -> None:
    loop = EngineLoop(make_engine())
    loop.call(lambda engine: engine.sessions.open("s")).result()
    events, _ = begin(loop, LONG)
    loop.close()
    loop.close()
    while isinstance(event := events.get(timeout=60), Delta):
        pass
    assert isinstance(event, EngineStopped)
    with pytest.raises(EngineStopped, match="closed"):
        loop.call(lambda engine: engine.audit())


def test_a_refused_command_leaves_the_engine_running(loop: EngineLoop) -> None:
    with pytest.raises(InvalidRequest):
        loop.call(lambda engine: engine.sessions.open("")).result()
    loop.call(lambda engine: engine.sessions.open("s")).result()


def test_the_executor_is_closed_once_in_its_own_thread() -> None:
    closed: list[str] = []
    loop = EngineLoop(make_engine(), lambda _: closed.append(threading.current_thread().name))
    loop.close()
    loop.close()
    assert closed == ["tenuto-engine"]


def test_a_stop_request_does_not_wait_for_the_step_in_progress() -> None:
    entered, release = threading.Event(), threading.Event()

    def work(engine: Engine) -> None:
        entered.set()
        release.wait(60)

    loop = EngineLoop(make_engine())
    loop.call(work)
    assert entered.wait(60)
    loop.request_stop()
    assert loop._thread.is_alive()
    release.set()
    loop.close()
    assert not loop._thread.is_alive()


def test_commands_that_issue_commands_do_not_keep_the_engine_from_its_steps(loop: EngineLoop) -> None:
    loop.call(lambda engine: engine.sessions.open("s")).result()
    stop = threading.Event()

    def again(engine: Engine) -> None:
        if not stop.is_set():
            loop.call(again)

    loop.call(again)
    events, _ = begin(loop, TurnParams(max_new_tokens=3))
    try:
        while (event := events.get(timeout=60)) is not None:
            assert isinstance(event, Delta)
            if event.result is not None:
                break
    finally:
        stop.set()


def test_running_turns_advance_between_commands_that_take_long_together(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    clock = engine.core.clock
    assert isinstance(clock, SystemClock)
    late = [0.0]
    monkeypatch.setattr(clock, "now", lambda: late[0])
    loop = EngineLoop(engine)
    steps: list[int] = []
    ready = threading.Event()

    def command(engine: Engine) -> None:
        late[0] += COMMANDS_SECONDS / 3.5
        steps.append(engine.steps)

    try:
        loop.call(lambda engine: engine.sessions.open("s")).result()
        begin(loop, LONG)[1].result(60)
        loop.call(lambda _: ready.wait(60))  # until all commands have come
        commands = [loop.call(command) for _ in range(40)]
        ready.set()
        for each in commands:
            each.result(60)
    finally:
        loop.close()
    assert max(Counter(steps).values()) == 4


def test_events_carry_logprobs_of_their_tokens_and_those_of_the_input_once(loop: EngineLoop) -> None:
    loop.call(lambda engine: engine.sessions.open("s")).result()
    asked = TurnParams(max_new_tokens=40, logprobs=1, input_logprobs=0)
    events, _ = begin(loop, asked)
    got = events_of(events)
    assert sum(len(event.tokens) for event in got) == 40
    for event in got:
        assert [entry.token for entry in event.logprobs] == list(event.tokens)
    told = [event.input_logprobs for event in got if event.input_logprobs]
    assert told == [got[0].input_logprobs]
    assert [entry and entry.token for entry in told[0]] == [None, 2, 3]


def test_a_prefill_only_turn_reports_its_scores_with_its_result(loop: EngineLoop) -> None:
    loop.call(lambda engine: engine.sessions.open("s")).result()
    events, _ = begin(loop, TurnParams(max_new_tokens=0, input_logprobs=0))
    (event,) = events_of(events)
    assert [entry and entry.token for entry in event.input_logprobs] == [None, 2, 3]


def test_events_carry_no_logprobs_unless_requested(loop: EngineLoop) -> None:
    loop.call(lambda engine: engine.sessions.open("s")).result()
    events, _ = begin(loop, TurnParams(max_new_tokens=5))
    assert all((event.logprobs, event.input_logprobs) == ((), ()) for event in events_of(events))


def test_an_idle_engine_answers_a_requested_audit(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes many steps, and does not wait for work between them."""
    monkeypatch.setattr(auditor, "VISITS_A_STEP", 1)
    waits: list[float] = []
    for number in range(20):
        loop.call(lambda e, name=f"s{number}": e.sessions.open(name)).result(60)  # type: ignore[misc]
    monkeypatch.setattr(loop, "_obey", recording(loop._obey, waits))
    report = loop.audit().result(60)
    assert (report.leases, report.pools[0].free) == (20, 1300)
    assert waits.count(0.0) >= 20


def recording(obey: Callable[[float], bool], waits: list[float]) -> Callable[[float], bool]:
    def recorded(wait: float) -> bool:
        waits.append(wait)
        return obey(wait)

    return recorded


def test_callers_waiting_for_an_audit_get_an_error_when_the_engine_ends() -> None:
    running = EngineLoop(make_engine())
    running.call(never_audit).result(60)
    answer = running.audit()
    running.close()
    with pytest.raises(EngineStopped):
        answer.result(60)
    with pytest.raises(EngineStopped):
        running.audit()


def never_audit(engine: Engine) -> None:
    """Makes audits never end."""
    engine.auditor.step = lambda flight: None  # type: ignore[method-assign,assignment]
