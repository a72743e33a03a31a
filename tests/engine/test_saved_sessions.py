"""A session is fully described by its records: rebuilt from them in another engine, it continues the same way, whatever
happened to it before."""

from __future__ import annotations

import pickle
from array import array
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.config import EngineConfig, WorkerSettings, engine_config
from tenuto.base.errors import AlreadyExists, ContextExceeded, InvalidRequest, TenutoError
from tenuto.base.options import Policy, TurnParams
from tenuto.base.turns import Message
from tenuto.base.views import SessionInfo
from tenuto.base.wire.document import Conversation, SessionDocument, read_document
from tenuto.base.wire.messages import ExportSession, Fork, ImportSession, OpenSession, Rewind, StartTurn, Trim
from tenuto.base.wire.request import Request
from tenuto.engine.engine import Engine
from tenuto.engine.thread.dispatcher import Dispatcher
from tenuto.engine.thread.rendering import Renderer
from tenuto.runtime.models import Model, build_engine, load_model
from tenuto.session.records import SavedSession, TurnRecord
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tenuto.text.prompt import Prompt
from tests.engine.stage import Stage


class Talk:
    """An engine on the witness, with its chat template."""

    def __init__(self, context_length: int = 2000) -> None:
        model = load_model(WorkerSettings(model="witness", page_size=4))
        self.engine = self._built(model, engine_config({"context_length": context_length, "audit_every": 1}))
        self.renderer = Renderer(model.chat, model.tokenizer)
        self.dispatcher = Dispatcher(self.engine, self.renderer)

    def _built(self, model: Model, config: EngineConfig) -> Engine:
        return build_engine(model, config, None)

    def open(self, system: str | None = None) -> Session:
        return self.do(OpenSession(session="s", policy=Policy(metadata=(("a", "b"),)), system=system))

    def do(self, command: Request[SessionInfo]) -> Session:
        return self.engine.registry.get(self.dispatcher.execute(command).session_id)

    def regenerate(self, session: Session, output: int) -> Turn:
        params = TurnParams(max_new_tokens=output)
        self.dispatcher.execute(StartTurn(kind="regenerate", tenant="", session=session.id, params=params))
        return self.engine.registry.turn(session.id)

    def play(self) -> None:
        while not self.engine.idle:
            self.engine.step()

    def prompt(self, given: str | list[int]) -> Prompt:
        return Prompt(messages=(Message("user", given),)) if isinstance(given, str) else Prompt(tuple(given))

    def begin(self, session: Session, given: str | list[int], output: int) -> Turn:
        command = StartTurn(
            kind="turn" if output else "append",
            tenant="",
            session=session.id,
            params=TurnParams(max_new_tokens=output),
        )
        prepared = self.renderer.prepare(self.dispatcher.basis(command), self.prompt(given), generate=output > 0)
        self.dispatcher.execute(command, prepared)
        return self.engine.registry.turn(session.id)

    def goes_on(self, session: Session) -> list[object]:
        """Returns the session's answers to two more messages, or their errors, and to a continuation."""
        said: list[object] = []
        texts: tuple[Any, ...] = ("and then?", [], "and at last?")
        for text in texts:
            try:
                self.begin(session, text, 4)
            except TenutoError as error:
                said.append((error.code, str(error)))
            self.play()
        return [*said, exported(session.saved())]


def exported(saved: SavedSession) -> SavedSession:
    """Returns the saved session as exports have it: without how its turns were made."""
    return replace(saved, records=tuple(msgspec.structs.replace(each, made=None) for each in saved.records))


def moved(saved: SavedSession) -> SavedSession:
    """Returns the saved session after a round trip through bytes."""
    return pickle.loads(pickle.dumps(saved))


STEPS = ("chat", "chat", "tokens", "append", "rewind", "cut", "fork", "regenerate", "trim", "barge in", "abort")


@settings(max_examples=40, deadline=None)
@given(
    system=st.sampled_from([None, "Be brief."]),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), max_size=8),
)
def test_a_session_rebuilt_from_its_records_continues_the_same_way(
    system: str | None, steps: list[tuple[str, int]]
) -> None:
    here, there = Talk(), Talk()
    session = here.open(system)
    for number, (step, n) in enumerate([("chat", 3), *steps]):
        try:
            session = take(here, session, step, n, f"message {number}")
        except TenutoError:  # not possible here; nothing has changed then
            continue
        finally:
            here.play()
    saved = session.saved()
    rebuilt = there.engine.sessions.restore(moved(saved))
    assert rebuilt.saved() == saved
    third = Talk()
    policy = Policy(metadata=saved.policy.metadata)
    imported = third.do(ImportSession(session=saved.session, policy=policy, document=in_a_file(here, saved.session)))
    assert imported.saved() == exported(saved)
    assert there.goes_on(rebuilt) == here.goes_on(session) == third.goes_on(imported)
    there.engine.audit()


def in_a_file(talk: Talk, session: str) -> SessionDocument:
    document = talk.dispatcher.execute(ExportSession(tenant="", session=session))
    return read_document(msgspec.json.encode(document.signed("a model")))


def take(talk: Talk, session: Session, step: str, n: int, text: str) -> Session:
    """Takes one step of a story. Returns the session it continues with."""
    if step in ("chat", "append"):
        talk.begin(session, text, n + 1 if step == "chat" else 0)
    elif step == "tokens":
        talk.begin(session, [n, n + 1], n)
    elif step == "rewind":
        talk.do(Rewind(tenant="", session=session.id, turn=n % (len(session.records) + 1)))
    elif step == "cut":
        talk.do(Rewind(tenant="", session=session.id, position=max(0, len(session.history) - 3 * n)))
    elif step == "fork":
        return talk.do(Fork(tenant="", session=session.id, position=max(0, len(session.history) - 2 * n), child=text))
    elif step == "regenerate":
        talk.regenerate(session, n + 1)
    elif step == "trim":
        picked = [i + 1 for i in range(len(session.records)) if i == 0 or (i + n) % 3]
        return talk.do(Trim(tenant="", session=session.id, turns=picked, child=text))
    else:
        turn = talk.begin(session, text, 20)
        while len(turn.output) < 3:
            talk.engine.step()
        talk.engine.turns.abort(session.id, n % 4 if step == "barge in" else None)
    return session


def chatted(talk: Talk) -> Session:
    session = talk.open()
    for text in ("hello", "and again"):
        talk.begin(session, text, 5)
        talk.play()
    return session


def test_a_record_has_its_turns_effect_on_the_conversation() -> None:
    talk = Talk()
    session = chatted(talk)
    answered = Conversation(system=False, dialogue=True, role="assistant")
    talk.begin(session, "no answer", 0)
    talk.play()
    talk.begin(session, [1, 2], 1)
    talk.play()
    assert [record.conversation for record in session.records] == [
        answered,
        answered,
        Conversation(system=False, dialogue=True, role="user"),
        None,
    ]
    assert not session.cut


@pytest.mark.parametrize(("back", "cut"), [(0, False), (5, False), (6, True)])
def test_a_cut_counts_only_inside_the_input(back: int, cut: bool) -> None:
    talk = Talk()
    session = chatted(talk)
    talk.do(Rewind(tenant="", session="s", position=len(session.history) - back))
    assert session.cut is cut
    if back:
        talk.do(Rewind(tenant="", session="s", position=len(session.history) - 1))  # the session stays cut
        assert session.cut


def test_a_trim_that_moves_a_cut_turn_leaves_it_cut() -> None:
    talk = Talk()
    session = chatted(talk)
    talk.begin(session, "third", 5)
    talk.play()
    talk.do(Rewind(tenant="", session="s", position=len(session.history) - 7))
    trimmed = talk.do(Trim(tenant="", session="s", turns=[1, 3], child="trimmed"))
    assert [record.cut for record in trimmed.records] == [False, True]
    with pytest.raises(TenutoError, match="cut inside"):
        talk.begin(trimmed, "and then?", 1)


def test_a_session_that_cannot_be_restored_is_refused_and_leaves_nothing() -> None:
    here, there = Talk(), Talk(context_length=40)
    saved = chatted(here).saved()
    with pytest.raises(AlreadyExists):
        here.engine.sessions.restore(saved)
    with pytest.raises(ContextExceeded):
        there.engine.sessions.restore(saved)
    with pytest.raises(InvalidRequest, match="token id"):
        there.engine.sessions.restore(SavedSession("s", Policy(), None, 1, array("i", [10**6]), (TurnRecord(0, 1, 1),)))
    assert not len(there.engine.registry)


@pytest.mark.parametrize(("down", "left"), [(0.0, 70.0), (20.0, 60.0), (1000.0, 60.0), (-50.0, 100.0)])
def test_a_rebuilt_sessions_ttl_continues_but_leaves_at_least_a_minute(down: float, left: float) -> None:
    stage = Stage()
    session = stage.committed("s", 10, ttl=100.0)
    used = stage.clock.wall()
    stage.clock.advance(30.0)
    saved = replace(session.saved(), used=used)
    later = Stage()
    later.clock.advance(30.0 + down if down >= 0 else 0.0)
    later.engine.sessions.restore(saved)
    later.clock.advance(left - 0.5)
    later.step()
    assert len(later.engine.registry) == 1
    later.clock.advance(1.0)
    later.step()
    assert not len(later.engine.registry)


@pytest.mark.parametrize(
    "records", [(), ((1, 2, 3),), ((0, 1, 2),), ((0, 1, 4),), ((0, 2, 1), (1, 2, 3)), ((0, 1, 1), (2, 3, 3))]
)
def test_records_that_do_not_cover_the_tokens_are_refused(records: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(InvalidRequest, match="do not cover"):
        SavedSession("s", Policy(), None, 1, array("i", [5, 6, 7]), tuple(TurnRecord(*each) for each in records))


def test_a_session_that_was_idle_for_most_of_its_ttl_before_a_restart_expires_in_time() -> None:
    stage = Stage()
    session = stage.committed("s", 10, ttl=1000.0)
    later = Stage()
    later.clock.advance(900.0)
    later.engine.sessions.restore(replace(session.saved(), used=stage.clock.wall()))
    later.clock.advance(100.0)
    later.step()
    assert not len(later.engine.registry)
