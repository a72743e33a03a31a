"""A service whose commits are acknowledged late or never: its answers meanwhile, and their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from queue import SimpleQueue

import msgspec
import pytest

from tenuto.base.config import WorkerSettings, engine_config
from tenuto.base.errors import NotAcknowledged
from tenuto.base.options import Policy, TurnParams
from tenuto.base.views import Stats, Transition
from tenuto.base.wire.messages import (
    AbortTurn,
    Draft,
    Fork,
    GetSession,
    GetStats,
    ListSessions,
    ListTurns,
    OpenSession,
    StartTurn,
)
from tenuto.base.wire.replies import Answer, AnyReply, Refusal, Stopped, Updates
from tenuto.base.wire.request import Request
from tenuto.runtime.models import load_model
from tenuto.runtime.service import Service
from tenuto.session.changes import Change
from tenuto.session.session import Session

TURN = StartTurn(kind="turn", tenant="t", session="s", input=[1, 2], params=TurnParams(max_new_tokens=3))


class Journal:
    """Acknowledges nothing from the first commit of a turn on until `safe`; fails while `failing`."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.safe = self.failing = False

    def acknowledge(self, changes: Sequence[Change]) -> int:
        self.changes += changes
        if self.failing:
            raise NotAcknowledged("the disk is full")
        before = takewhile(lambda change: change.turn is None, self.changes)
        return len(self.changes if self.safe else list(before))

    def take_lost(self) -> Sequence[Session]:
        return ()


class Stand:
    def __init__(self) -> None:
        self.journal = Journal()
        self.replies: SimpleQueue[AnyReply] = SimpleQueue()
        model, config = (
            load_model(WorkerSettings(model="witness", page_size=4)),
            engine_config({"context_length": 2000}),
        )
        self.service = Service(model, config, None, self.replies.put, self.journal)
        self._calls = count(1)

    def ask(self, request: Request[object]) -> int:
        call = next(self._calls)
        self.service.handle(msgspec.structs.replace(request, call=call))
        return call

    def told(self) -> list[tuple[int, str]]:
        """Returns the replies so far, up to the answer to a question that reveals nothing."""
        last = self.ask(GetStats())
        told: list[tuple[int, str]] = []
        while not (isinstance(reply := self.replies.get(timeout=60), Answer) and reply.call == last):
            match reply:
                case Answer():
                    told.append((reply.call, "answered"))
                case Refusal():
                    told.append((reply.call, reply.code))
                case Updates():
                    told += [(call, "ended") for call, delta in reply.updates if delta.result is not None]
        assert isinstance(reply, Answer)
        self.stats = msgspec.msgpack.decode(reply.value, type=Stats)
        return told

    def until_committed(self, commits: int) -> list[tuple[int, str]]:
        told = self.told()
        while self.stats.transitions.get(Transition("commit"), 0) < commits:
            told += self.told()
        return told

    def acknowledge(self) -> None:
        self.journal.safe = True
        self.service._loop.wake()


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    yield made
    made.service.close()


def test_answers_that_reveal_a_commit_follow_its_last_delta(stand: Stand) -> None:
    opened, turn = stand.ask(OpenSession(session="s", policy=Policy(tenant="t"))), stand.ask(TURN)
    assert stand.until_committed(1) == [(opened, "answered"), (turn, "answered")]
    requests: tuple[Request[object], ...] = (
        GetSession(tenant="t", session="s"),
        ListTurns(tenant="t", session="s"),
        ListSessions(tenant="t"),
        Fork(tenant="t", session="s", child="f"),
        TURN,
        Draft(tenant="t", session="f", input=[5]),
        GetSession(tenant="t", session="nowhere"),
    )
    calls = [stand.ask(request) for request in requests]
    assert stand.until_committed(2) == []
    stand.acknowledge()
    told = stand.told()
    awaited = {(calls[1], "answered"), (calls[4], "ended"), (calls[5], "answered")}
    while not awaited <= set(told):  # texts of turns and tokens of drafts are made on other threads
        told += stand.told()
    assert told[0] == (turn, "ended")
    assert {call for call, how in told if how == "answered"} == set(calls[:-1])
    assert (calls[-1], "not_found") in told
    assert told.index((calls[4], "answered")) < told.index((calls[4], "ended"))


def test_while_commits_cannot_be_acknowledged_turns_fail_and_none_begins(stand: Stand) -> None:
    stand.ask(OpenSession(session="s", policy=Policy(tenant="t")))
    turn = stand.ask(TURN)
    stand.until_committed(1)
    stand.journal.failing = True
    stand.service._loop.wake()
    told: list[tuple[int, str]] = []
    while not told:
        told = stand.told()
    assert told == [(turn, "not_acknowledged")]
    late = [stand.ask(TURN), stand.ask(GetSession(tenant="t", session="s"))]
    assert stand.told() == [(call, "not_acknowledged") for call in late]
    assert stand.stats.transitions[Transition("submit")] == 1
    abort = stand.ask(AbortTurn(tenant="t", session="s", turn=99))
    assert stand.told() == [(abort, "not_acknowledged")]
    stand.journal.failing = False
    stand.acknowledge()
    again = stand.ask(GetSession(tenant="t", session="s"))
    assert (again, "answered") in stand.told()


def test_the_last_message_reports_that_the_engine_has_stopped() -> None:
    stand = Stand()
    senders: set[str] = set()

    def send(reply: AnyReply) -> None:
        senders.add(threading.current_thread().name)
        stand.replies.put(reply)

    stand.service._outbox._send = send
    stand.ask(OpenSession(session="s", policy=Policy(tenant="t")))
    turn = stand.ask(TURN)
    stand.until_committed(1)
    stand.service.close()
    replies = []
    while not stand.replies.empty():
        replies.append(stand.replies.get())
    assert isinstance(replies[-1], Stopped)
    assert [reply.call for reply in replies if isinstance(reply, Refusal)] == [turn]
    assert senders == {"tenuto-outbox"}
