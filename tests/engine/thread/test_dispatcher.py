"""All commands are checked in one place, and a refused one has changed nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tenuto.base.config import Limits
from tenuto.base.errors import AlreadyExists, InvalidRequest, LimitReached, NotFound, TenutoError, VersionMismatch
from tenuto.base.options import Policy
from tenuto.base.sampling import Sampling
from tenuto.base.views import SessionState
from tenuto.base.wire.messages import (
    AbortTurn,
    CloseSession,
    Draft,
    Fork,
    GetSession,
    ListTurns,
    OpenSession,
    Rewind,
    StartTurn,
    Trim,
)
from tenuto.base.wire.request import Request
from tenuto.base.wire.trainer_messages import ReleaseMemory
from tenuto.engine.thread.rendering import Basis, Outdated
from tenuto.session.session import Session
from tests.engine.test_saved_sessions import Talk, chatted

PLACE: dict[str, Any] = {"tenant": "", "session": "s"}
VERSIONED: list[Request[Any]] = [
    StartTurn(kind="turn", **PLACE),
    StartTurn(kind="append", **PLACE),
    StartTurn(kind="regenerate", **PLACE),
    Draft(input=[1], **PLACE),
    Fork(child="child", **PLACE),
    Trim(child="child", turns=[1], **PLACE),
    Rewind(turn=1, **PLACE),
    CloseSession(**PLACE),
]
LIMITED: list[Request[Any]] = [*VERSIONED[:-2], StartTurn(kind="turn", tenant="")]
OPENING: list[Request[Any]] = [*VERSIONED[4:6], OpenSession(session="more", policy=Policy())]


def execute(talk: Talk, command: Request[Any], **changed: Any) -> Any:
    """Carries a command out; prepared input adds one more message."""
    command = msgspec.structs.replace(command, **changed)
    prepared = None
    if isinstance(command, Draft | StartTurn):
        basis = talk.dispatcher.guess(command) or Basis.opening(100)
        prepared = talk.renderer.prepare(basis, talk.prompt("more"), generate=True)
    return talk.dispatcher.execute(command, prepared)


def state(talk: Talk) -> list[object]:
    return [(session.saved(), session.turn) for session in talk.engine.registry]


@pytest.fixture
def talk() -> Talk:
    made = Talk()
    chatted(made)
    return made


@pytest.mark.parametrize("command", VERSIONED)
def test_a_command_for_an_outdated_version_is_refused(talk: Talk, command: Request[Any]) -> None:
    before = state(talk)
    with pytest.raises(VersionMismatch, match="version 2, not 1"):
        execute(talk, command, version=1)
    assert state(talk) == before
    execute(talk, command, version=2)
    assert state(talk) != before


@pytest.mark.parametrize("command", LIMITED)
def test_a_tenant_at_its_token_limit_gets_no_more(talk: Talk, command: Request[Any]) -> None:
    before, (session,) = state(talk), list(talk.engine.registry)
    with pytest.raises(LimitReached, match="tokens"):
        execute(talk, command, limits=Limits(tokens=len(session.history)))
    assert state(talk) == before
    execute(talk, command, limits=Limits(tokens=len(session.history) + 1))


@pytest.mark.parametrize("command", LIMITED)
def test_a_tenant_at_its_journal_limit_gets_no_more(talk: Talk, command: Request[Any]) -> None:
    before, (session,) = state(talk), list(talk.engine.registry)
    assert session.journal_bytes > 4 * len(session.history)
    with pytest.raises(LimitReached, match="bytes in the journal"):
        execute(talk, command, limits=Limits(journal_bytes=session.journal_bytes))
    assert state(talk) == before
    execute(talk, command, limits=Limits(journal_bytes=session.journal_bytes + 1))


@pytest.mark.parametrize("command", [command for command in LIMITED if command not in OPENING[2:]])
def test_a_session_at_its_tenants_size_limit_does_not_continue(talk: Talk, command: Request[Any]) -> None:
    before, (session,) = state(talk), list(talk.engine.registry)
    if getattr(command, "session", None) is None:
        return
    units, size = talk.engine.registry.units_of(session), session.journal_bytes
    assert units == -(-(len(session.history) - 1) // talk.engine.memory.page_size)
    for limits in (Limits(session_units=units), Limits(session_journal_bytes=size)):
        with pytest.raises(LimitReached, match=r"session s (takes|has)"):
            execute(talk, command, limits=limits)
    assert state(talk) == before
    execute(talk, command, limits=Limits(session_units=units + 1, session_journal_bytes=size + 1))


def test_idle_sessions_of_a_tenant_leave_the_device_when_it_keeps_too_much_there(talk: Talk) -> None:
    (first,), engine = list(talk.engine.registry), talk.engine
    second = engine.sessions.open("second")
    talk.begin(second, "words and words", 5)
    talk.play()
    other = engine.sessions.open("other", Policy(tenant="other"))
    use = engine.registry.use("")
    assert use.units == first.memory.kept_units + second.memory.kept_units > 0
    most = second.memory.kept_units + 1
    info = talk.dispatcher.execute(OpenSession(session="third", policy=Policy(), limits=Limits(units=most)))
    assert (info.session_id, first.memory.computed) == ("third", 0)
    assert use.units == second.memory.kept_units
    with pytest.raises(LimitReached, match="units of memory"):
        execute(talk, StartTurn(kind="turn", tenant="", session="second"), limits=Limits(units=use.units))
    assert second.memory.computed
    talk.begin(second, "more", 5)
    engine.step()
    with pytest.raises(LimitReached, match="units of memory"):
        talk.dispatcher.execute(OpenSession(session="fourth", policy=Policy(), limits=Limits(units=1)))
    talk.play()
    engine.sessions.close("second")
    assert use.units == 0
    assert other.state is SessionState.OPEN
    engine.audit()


def test_no_session_leaves_the_device_for_a_refused_command(talk: Talk) -> None:
    (first,), engine = list(talk.engine.registry), talk.engine
    second = engine.sessions.open("second")
    talk.begin(second, "words and words", 5)
    talk.play()
    computed = first.memory.computed, second.memory.computed
    assert min(computed) > 0
    limits = Limits(units=engine.registry.use("").units)
    refused: list[tuple[type[TenutoError], Request[Any]]] = [
        (AlreadyExists, OpenSession(session="second", policy=Policy(), limits=limits)),
        (InvalidRequest, Fork(tenant="", session="second", child="third", turn=9, limits=limits)),
        (InvalidRequest, StartTurn(kind="regenerate", tenant="", limits=limits)),
        (LimitReached, OpenSession(session="third", policy=Policy(), limits=Limits(units=0))),
    ]
    for error, command in refused:
        with pytest.raises(error):
            execute(talk, command)
        assert (first.memory.computed, second.memory.computed) == computed, command
    talk.dispatcher.basis(StartTurn(kind="turn", tenant="", session="second", limits=limits))
    assert (first.memory.computed, second.memory.computed) == computed
    execute(talk, Fork(tenant="", session="second", child="third", limits=limits))
    assert (first.memory.computed, second.memory.computed) == (0, computed[1])
    engine.audit()


@pytest.mark.parametrize("command", OPENING)
def test_a_tenant_at_its_session_limit_gets_no_more(talk: Talk, command: Request[Any]) -> None:
    before = state(talk)
    with pytest.raises(LimitReached, match="sessions"):
        execute(talk, command, limits=Limits(sessions=1))
    assert state(talk) == before
    execute(talk, command, limits=Limits(sessions=2))


@pytest.mark.parametrize("command", [*VERSIONED, AbortTurn(**PLACE), GetSession(**PLACE), ListTurns(**PLACE)])
def test_a_session_is_visible_only_to_its_tenant(talk: Talk, command: Request[Any]) -> None:
    before = state(talk)
    for other in ({"tenant": "other"}, {"session": "nowhere"}):
        with pytest.raises(NotFound):
            execute(talk, command, **other)
    assert state(talk) == before


@pytest.mark.parametrize("command", [VERSIONED[0], VERSIONED[3]])
def test_input_prepared_for_another_history_is_refused(talk: Talk, command: StartTurn) -> None:
    prepared = talk.renderer.prepare(talk.dispatcher.basis(command), talk.prompt("more"), generate=True)
    talk.do(Rewind(turn=1, **PLACE))
    before = state(talk)
    with pytest.raises(Outdated):
        talk.dispatcher.execute(command, prepared)
    assert state(talk) == before
    again = talk.renderer.prepare(talk.dispatcher.basis(command), talk.prompt("more"), generate=True)
    talk.dispatcher.execute(command, again)


@pytest.mark.parametrize("refused", [{"params": 10**6}, {"input": 10**6}])
def test_a_refused_one_shot_turn_leaves_no_session(talk: Talk, refused: dict[str, int]) -> None:
    command = StartTurn(kind="turn", tenant="")
    if "params" in refused:
        command = msgspec.structs.replace(
            command, params=replace(command.params, sampling=Sampling(logit_bias=((10**6, 1.0),)))
        )
    prepared = talk.renderer.prepare(Basis.opening(100), talk.prompt([refused.get("input", 1)]), generate=True)
    before = state(talk)
    with pytest.raises(InvalidRequest):
        talk.dispatcher.execute(command, prepared)
    assert state(talk) == before


@pytest.mark.parametrize("turns", [[2], [1, 1], [2, 1], [3], "12", None])
def test_a_trim_to_turns_that_form_no_conversation_leaves_no_session(talk: Talk, turns: Any) -> None:
    before = state(talk)
    with pytest.raises(InvalidRequest):
        talk.dispatcher.execute(Trim(child="child", turns=turns, **PLACE))
    assert state(talk) == before


def test_anything_but_a_command_is_refused(talk: Talk) -> None:
    with pytest.raises(TenutoError, match="not a known command"):
        talk.dispatcher.execute(Request())


def test_a_closed_session_is_gone(talk: Talk) -> None:
    talk.dispatcher.execute(CloseSession(**PLACE))
    sessions: list[Session] = list(talk.engine.registry)
    assert sessions == []


def test_the_command_to_release_memory_releases_it(talk: Talk) -> None:
    talk.dispatcher.execute(ReleaseMemory(parts=["kv_cache"]))
    assert talk.engine.occupation.released == {"kv_cache"}
