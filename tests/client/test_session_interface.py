"""The session interface, once in this process and once over HTTP: the same calls, results and errors."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tenuto
from tenuto.base.errors import (
    AlreadyExists,
    ContextExceeded,
    EngineStopped,
    IllegalTransition,
    InvalidRequest,
    NotFound,
    SessionBusy,
)
from tenuto.base.turns import EndReason
from tenuto.base.views import RecordPage
from tenuto.client import core
from tests.client.conftest import CONTEXT
from tests.eventually import eventually
from tests.said import said
from tests.serve.server import Server

AnyEngine = tenuto.Engine | tenuto.RemoteEngine


@pytest.fixture(params=["in this process", "over HTTP"])
def engine(request: pytest.FixtureRequest) -> Iterator[AnyEngine]:
    if request.param == "over HTTP":
        yield request.getfixturevalue("remote")
        return
    with tenuto.Engine("witness", page_size=4, context_length=CONTEXT, audit_every=20) as running:
        yield running
        running.audit()


def test_an_exported_session_can_be_imported_here_or_elsewhere(engine: AnyEngine, witness: Server) -> None:
    session = engine.session("kept", system="Be brief.", ttl=60)
    session.chat("hello", max_new_tokens=5).result()
    saved = session.export()
    with pytest.raises(AlreadyExists):
        engine.import_session(saved)
    again = engine.import_session(saved, session_id="again")
    with tenuto.connect(witness.url) as other, tenuto.Engine("witness") as local:
        sessions = [again, other.import_session(saved, session_id="elsewhere"), local.import_session(saved)]
        for each in sessions:
            assert each.history == session.history
            assert each.info.ttl == 60
        assert len({tuple(each.chat("and then?", max_new_tokens=5).tokens()) for each in sessions}) == 1
        sessions[1].close()
        for wrong in (saved[:-9], saved.replace(b"tenuto-session-1", b"tenuto-session-9"), b"[]", "nothing", b"\xff"):
            with pytest.raises(InvalidRequest):
                engine.import_session(wrong, session_id="never")


def test_a_session_with_its_state_can_be_saved_to_a_file(engine: AnyEngine, tmp_path: Path) -> None:
    session = engine.session("stated", system="Be brief.", ttl=60)
    session.chat("hello " * 60, max_new_tokens=5).result()
    path = tmp_path / "session"
    session.export_file(path)
    with pytest.raises(AlreadyExists):
        engine.import_file(path)
    again = engine.import_file(path, session_id="again")
    assert (again.history, again.info.ttl, again.info.computed) == (session.history, 60, session.info.tokens - 1)
    computed, after = again.info.computed, again.chat("and then?", max_new_tokens=5)
    assert after.result().usage.cached == computed
    assert list(session.chat("and then?", max_new_tokens=5).tokens()) == after.token_ids
    again.close()
    content = path.read_bytes()
    for wrong in (content[:-9], content[:-1] + b"x", b"[]", session.export(), content.replace(b'"s', b'"t', 1)):
        path.write_bytes(wrong)
        with pytest.raises(InvalidRequest):
            engine.import_file(path, session_id="never")
    turn = session.chat("go on", max_new_tokens=3000)
    with pytest.raises(SessionBusy):
        session.export_file(tmp_path / "busy")
    assert not (tmp_path / "busy").exists()
    turn.abort()
    with pytest.raises(InvalidRequest, match="cannot be written"):
        session.export_file(tmp_path / "none" / "file")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        engine.import_file(tmp_path / "none")
    session.close()


def test_a_session_continues_where_its_last_turn_ended(engine: AnyEngine) -> None:
    session = engine.session(ttl=60, priority=1)
    expected: list[int] = []
    for number in range(3):
        turn = session.turn([number, 7], max_new_tokens=6, ignore_eos=True)
        expected += [number, 7]
        assert list(turn.tokens()) == said(expected, 6)
        expected += said(expected, 6)
        result = turn.result()
        assert (result.reason, result.committed, result.kept) == (EndReason.LENGTH, True, 6)
        assert (result.version, result.max_new_tokens, result.context_left) == (number + 1, 6, CONTEXT - len(expected))
        assert (result.usage.prompt, result.usage.cached) == (len(expected) - 6, max(0, len(expected) - 9))
        assert turn.time_to_first_token is not None
    assert session.history == expected
    info = session.info
    assert (info.session_id, info.state, info.turn) == (session.id, "open", None)
    assert (info.turns, info.tokens, info.computed, info.version) == (3, 24, 23, 3)
    assert (info.context_left, engine.context_length) == (CONTEXT - 24, CONTEXT)
    assert engine.sessions() == [info]


def test_turns_of_several_sessions_run_at_the_same_time(engine: AnyEngine) -> None:
    turns = [engine.session().turn([number], max_new_tokens=50, ignore_eos=True) for number in range(6)]
    assert [turn.result().kept for turn in turns] == [50] * 6
    assert [turn.token_ids for turn in turns] == [said([number], 50) for number in range(6)]
    assert all(turn.time_to_first_token is not None for turn in turns)


def test_stop_ids_end_a_turn(engine: AnyEngine) -> None:
    expected = said([1], 9)
    result = engine.session().turn([1], stop_ids=expected[4:5]).result()
    assert (result.reason, result.kept, result.stop) == (EndReason.STOP, 5, expected[4])


def test_a_one_shot_turn_leaves_no_session(engine: AnyEngine) -> None:
    turn = engine.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True)
    assert list(turn.tokens()) == said([1, 2, 3], 4)
    assert engine.sessions() == []
    with pytest.raises(InvalidRequest):
        engine.generate([])
    with pytest.raises(InvalidRequest):
        engine.generate([1000])
    with engine.generate([1], ignore_eos=True) as dropped:
        next(dropped.tokens())
    eventually(lambda: engine.sessions() == [])


def test_aborting_rolls_back_and_keeping_commits(engine: AnyEngine) -> None:
    session = engine.session()
    assert session.append([1, 2, 3]).reason is EndReason.APPENDED
    turn = session.turn([4], ignore_eos=True)
    next(turn.tokens())
    assert not turn.abort().committed
    assert session.history == [1, 2, 3]
    turn = session.turn([4], ignore_eos=True)
    next(turn.tokens())
    assert turn.abort(keep=1).kept == 1
    assert session.history == [1, 2, 3, 4, *said([1, 2, 3, 4], 1)]


def test_a_barge_in_keeps_no_more_than_its_reader_was_given(engine: AnyEngine) -> None:
    session = engine.session()
    turn = session.turn([5], ignore_eos=True, speculate=False)
    heard = [next(turn.tokens()) for _ in range(40)]
    result = turn.abort(keep="delivered")
    assert 30 < result.kept <= 40  # the last token may not have its text yet
    assert session.history == [5, *heard[: result.kept]]
    assert list(turn.tokens()) == []
    assert turn.abort() == turn.result() == result


def test_output_that_a_barge_in_keeps_beyond_the_tokens_read_can_still_be_read(engine: AnyEngine) -> None:
    session = engine.session()
    turn = session.turn([5], ignore_eos=True)
    next(turn.tokens())
    eventually(lambda: turn._events.qsize() > 30)
    assert turn.abort(keep=20).kept == 20
    assert turn.result().kept == 20
    assert turn.token_ids == said([5], 20)
    assert session.history == [5, *turn.token_ids]


def test_dropping_a_stream_aborts_its_turn(engine: AnyEngine) -> None:
    session = engine.session()

    def read_a_little() -> None:
        for _ in session.turn([1], ignore_eos=True).tokens():
            return

    read_a_little()
    gc.collect()
    eventually(lambda: session.info.turn is None)
    with session.turn([1], ignore_eos=True) as turn:
        next(turn.tokens())
    eventually(lambda: session.info.turn is None)
    assert (session.history, session.info.version) == ([], 0)


def test_fork_and_rewind_are_cheap_and_exact(engine: AnyEngine) -> None:
    session = engine.session()
    for number in range(3):
        session.turn([number], max_new_tokens=9, ignore_eos=True).result()
    history = session.history
    whole, early, inside = session.fork(session_id="whole"), session.fork(turn=1), session.fork(position=25)
    assert [f.history for f in (whole, early, inside)] == [history, history[:10], history[:25]]
    assert whole.id == "whole"
    turn = whole.turn([50], max_new_tokens=3, ignore_eos=True)
    assert turn.result().usage.cached == 29
    assert turn.token_ids == said([*history, 50], 3)
    assert session.rewind(turn=2).tokens == 20
    assert session.turn([60], max_new_tokens=2).result().usage.cached == 19
    assert session.rewind(position=np.int64(5)).turns == 1  # type: ignore[arg-type]
    assert session.history == history[:5]
    assert early.history == history[:10]


def test_a_trimmed_session_has_the_chosen_turns(engine: AnyEngine) -> None:
    session = engine.session()
    for number in range(3):
        session.append([number, 9])
    trimmed = session.trim([1, 3], session_id="short")
    assert (trimmed.id, trimmed.history) == ("short", [0, 9, 2, 9])
    assert trimmed.turn([5], max_new_tokens=2, ignore_eos=True).result().usage.prompt == 5
    assert session.history == [0, 9, 1, 9, 2, 9]
    for wrong in ("all", [3, 1], [4], [0], [1.5], 1, None):
        with pytest.raises(InvalidRequest):
            session.trim(wrong)  # type: ignore[arg-type]


def test_a_session_is_found_again_by_its_name(engine: AnyEngine) -> None:
    session = engine.session("tea")
    session.append([1, 2])
    same = engine.attach("tea")
    assert (type(same), same.id, same.history) == (type(session), "tea", [1, 2])
    same.close()
    for gone in ("tea", "nobody"):
        with pytest.raises(NotFound):
            engine.attach(gone)
    with pytest.raises(InvalidRequest):
        engine.attach(5)  # type: ignore[arg-type]


def test_a_listing_and_a_history_of_several_pages_are_complete(
    engine: AnyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "PAGE", 2)
    session = engine.session()
    for number in range(5):
        session.append([number])
    assert session.history == [0, 1, 2, 3, 4]
    opened = sorted([session.id, *(engine.session().id for _ in range(4))])
    assert [info.session_id for info in engine.sessions()] == opened


def test_a_history_that_changes_while_it_is_read_is_read_again(
    engine: AnyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "PAGE", 2)
    session, again = engine.session("changing"), engine.attach("changing")
    for number in range(5):
        session.append([number])
    asked, ask = list[int](), again._core._turns_from

    def rewound_meanwhile(first: int) -> Future[RecordPage]:
        asked.append(first)
        if asked != [1, 1, 3]:
            return ask(first)
        answer = Future[RecordPage]()

        def work() -> None:
            session.rewind(turn=1)
            session.append([7])
            answer.set_result(ask(first).result())

        threading.Thread(target=work).start()
        return answer

    monkeypatch.setattr(again._core, "_turns_from", rewound_meanwhile)
    assert again.history == [0, 7]
    assert asked == [1, 1, 3, 1]


def test_aborting_from_another_thread_ends_the_reading(engine: AnyEngine) -> None:
    turn = engine.session().turn([1], ignore_eos=True)
    next(turn.tokens())
    aborting = threading.Thread(target=turn.abort)
    aborting.start()
    assert not turn.result().committed
    aborting.join()


def test_a_refusal_names_its_option(engine: AnyEngine) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engine.session().turn([1], temperature=-1)
    assert refused.value.param == "temperature"


def test_numpy_numbers_are_accepted_everywhere(engine: AnyEngine) -> None:
    session = engine.session(ttl=np.float32(60), priority=np.int8(1), max_tokens=np.int64(100))  # type: ignore[arg-type]
    assert (session.info.ttl, session.info.priority, session.info.limit) == (60, 1, 100)
    options = {"max_new_tokens": np.int16(2), "temperature": np.float32(0.5), "stop_ids": np.array([1, 2])}
    assert session.turn([1], **options).result().max_new_tokens == 2  # type: ignore[arg-type]
    assert session.trim(np.array([1])).history == session.history  # type: ignore[arg-type]


def test_regenerate_replaces_the_last_output(engine: AnyEngine) -> None:
    session = engine.session()
    session.turn([1], max_new_tokens=5, ignore_eos=True).result()
    assert session.regenerate(max_new_tokens=3, ignore_eos=True).result().kept == 3
    assert session.history == [1, *said([1], 3)]
    with pytest.raises(IllegalTransition):
        engine.session().regenerate()


def test_a_draft_is_computed_before_it_is_sent(engine: AnyEngine) -> None:
    session = engine.session()
    session.draft(range(50))
    session.draft([*range(50), 60, 61])
    eventually(lambda: session.info.turn == "drafting")
    assert session.turn([*range(50), 60, 70], max_new_tokens=2).result().usage.prompt == 52
    assert session.history[:52] == [*range(50), 60, 70]
    session.draft([1, 2, 3])
    session.abort()
    assert session.info.turn is None
    with pytest.raises(IllegalTransition):
        session.abort()


def test_the_pieces_of_a_text_add_up_to_the_whole(engine: AnyEngine) -> None:
    session = engine.session()
    turn = session.turn([1], max_new_tokens=20, ignore_eos=True)
    pieces = list(turn)
    assert "".join(pieces) == turn.text
    assert turn.token_ids == said([1], 20)


def test_tokens_become_text_again(engine: AnyEngine) -> None:
    turn = engine.generate("Some words.", max_new_tokens=5, ignore_eos=True)
    turn.result()
    assert engine.detokenize(turn.token_ids) == turn.text
    assert engine.detokenize([]) == ""
    for wrong in ([-1], [2**40], "text"):
        with pytest.raises(InvalidRequest):
            engine.detokenize(wrong)  # type: ignore[arg-type]


def test_a_wrong_call_is_a_typed_error_and_changes_nothing(engine: AnyEngine) -> None:
    session = engine.session("mine")
    with pytest.raises(AlreadyExists):
        engine.session("mine")
    with pytest.raises(ContextExceeded):
        session.turn([1] * (CONTEXT + 1))
    for wrong in ([1000], [-1], [1.9], ["12"], [True], ["x"], [1.5, "x"], {"role": "user"}, b"x", 5, None, np.array(5)):
        with pytest.raises(InvalidRequest):
            session.turn(wrong)  # type: ignore[arg-type]
    for messages in ([{"role": "user"}], [{"role": "nobody", "content": ""}], [{"role": "user", "content": 5}]):
        with pytest.raises(InvalidRequest):
            session.turn(messages)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="unknown turn options"):
        session.turn([1], max_tokens=5)  # type: ignore[call-arg]
    for options in ({"temperature": -1}, {"stop": 5}, {"seed": 1.5}, {"top_p": float("nan")}, {"timeout": "soon"}):
        with pytest.raises(InvalidRequest):
            session.turn([1], **options)
    assert session.info.version == 0
    turn = session.turn([1], ignore_eos=True)
    with pytest.raises(SessionBusy):
        session.turn([2])
    for keep in (-1, 1.5, "most", True):
        with pytest.raises(InvalidRequest, match="keep"):
            turn.abort(keep=keep)  # type: ignore[arg-type]
    turn.abort()
    session.close()
    with pytest.raises(NotFound):
        session.turn([1])


def test_invalid_arguments_of_a_session_or_fork_are_refused_and_open_none(engine: AnyEngine) -> None:
    session = engine.session()
    for wrong in (
        lambda: engine.session(5),  # type: ignore[arg-type]
        lambda: engine.session(ttl=10**400),
        lambda: engine.session(priority=None),  # type: ignore[arg-type]
        lambda: engine.session(max_tokens=True),
        lambda: session.fork(position=1.5),  # type: ignore[arg-type]
        lambda: session.fork(turn="first"),  # type: ignore[arg-type]
        lambda: session.fork(turn=7),
        lambda: session.rewind(position=1),
        lambda: engine.session(".."),
        lambda: session.fork(session_id="."),
    ):
        with pytest.raises(InvalidRequest):
            wrong()
    assert len(engine.sessions()) == 1


def test_options_mean_the_same_in_every_form(engine: AnyEngine) -> None:
    plain = {"max_new_tokens": 5, "temperature": 0.9, "seed": 3, "stop_ids": [1], "logit_bias": {7: 1.0, 8: 2.0}}
    other = {**plain, "max_new_tokens": np.int64(5), "stop_ids": (i for i in [1]), "logit_bias": [(7, 1), (8, 2)]}
    one, two = (engine.session().turn(np.array([1, 2], np.int32), **options) for options in (plain, other))  # type: ignore[arg-type]
    first, second = one.result(), two.result()
    assert replace(first, usage=second.usage) == second  # the second turn may be guessed from the first
    assert one.token_ids == two.token_ids


def test_reading_tokens_can_be_stopped_in_the_middle_of_those_that_came_together(engine: AnyEngine) -> None:
    for _ in range(2):  # the second turn is guessed from the first, so that several tokens come at once
        turn = engine.session().turn([5, 6, 7], max_new_tokens=40)
        read = [next(turn.tokens()) for _ in range(10)] + list(turn.tokens())
        assert read == turn.token_ids == said([5, 6, 7], 40)
    assert turn.result().usage.accepted > 0  # how many are guessed depends on the times of steps


def test_a_deadline_aborts_a_turn(engine: AnyEngine) -> None:
    result = engine.session().turn([1], timeout=0.02, ignore_eos=True).result()
    assert (result.reason, result.committed) == (EndReason.DEADLINE, False)


def test_the_audit_accounts_for_every_unit(engine: AnyEngine) -> None:
    engine.session().append(range(60, 70))
    report = engine.audit()
    assert isinstance(report, tenuto.AuditReport)
    assert report.pools[0].by_holder["session"] == 3
    assert "every unit accounted for" in str(report)


@pytest.mark.parametrize("where", ["in this process", "over HTTP"])
def test_closing_an_engine_ends_everything_open(where: str, witness: Server) -> None:
    engine: AnyEngine = tenuto.connect(witness.url) if where == "over HTTP" else tenuto.Engine("witness")
    session = engine.session(ttl=1)
    ended = session.turn([1], max_new_tokens=2)
    result = ended.result()
    turn = session.turn([1], ignore_eos=True)
    next(turn.tokens())
    engine.close()
    with pytest.raises(EngineStopped, match="closed"):
        turn.result()
    with pytest.raises(EngineStopped):
        engine.session()
    assert ended.abort() == result
    engine.close()
