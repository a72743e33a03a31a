"""Responses, and turns without readers, outlive the replica that has begun them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.eventually import eventually
from tests.postgres import database
from tests.serve.replicas import Replicas, replicas
from tests.serve.server import END_SECONDS, Server
from tests.serve.test_background import WITHOUT_END, ask, client_of, ended
from tests.serve.test_killed_streams import witness_output
from tests.serve.test_moves import move

LONG: Any = {"background": True, "temperature": 0, "max_output_tokens": 400, "extra_body": WITHOUT_END}


@pytest.fixture
def fleet() -> Iterator[Replicas]:
    options = ("--model", "witness:0.01", "--context-length", "8192", "--drain-seconds", "60")
    with replicas(database(), 3, *options, lease=4) as servers:
        yield servers


def clients_of(servers: list[Server], closing: ExitStack) -> list[OpenAI]:
    return [closing.enter_context(client_of(server)) for server in servers]


def events_of(client: OpenAI, name: str) -> list[dict[str, Any]]:
    """Returns all events of a response, once it has ended."""
    return [event.to_dict() for event in client.responses.retrieve(name, stream=True)]


def require_missing(client: OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name)


def test_responses_are_known_where_their_sessions_have_moved(fleet: Replicas) -> None:
    with ExitStack() as closing:
        one, two, three = clients = clients_of(fleet.servers, closing)
        http = closing.enter_context(fleet.servers[2].client())
        short = ask(one, temperature=0)
        long = ask(one, **LONG)
        for name in (short.id, long.id):
            assert move(fleet, http, name, 1).status_code == 200
        for client in clients:
            assert client.responses.retrieve(short.id) == short
            assert client.responses.retrieve(long.id).status in ("in_progress", "incomplete")
        more = ask(three, previous_response_id=short.id, input="and?", max_output_tokens=1)
        assert more.usage.input_tokens_details.cached_tokens >= short.usage.input_tokens
        done = ended(three, long.id)
        assert (done.status, done.usage.output_tokens) == ("incomplete", 400)
        events = events_of(two, long.id)
        assert events[-1]["response"] == done.to_dict()
        for client in clients:
            assert client.responses.retrieve(long.id) == done
            assert events_of(client, long.id) == events
            (item,) = client.responses.input_items.list(long.id).data
            assert item.to_dict()["content"] == [{"type": "input_text", "text": "hi"}]
        cancelled = ask(one, **{**LONG, "max_output_tokens": 8000})
        assert move(fleet, http, cancelled.id, 1).status_code == 200
        assert three.responses.cancel(cancelled.id).status == "cancelled"
        three.responses.delete(short.id)
        for client in clients:
            require_missing(client, short.id)
        for server in fleet.servers:
            server.audit()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_what_goes_on_without_readers_outlives_its_replica(fleet: Replicas, sent: signal.Signals) -> None:
    with ExitStack() as closing:
        one, *others = clients_of(fleet.servers, closing)
        http = closing.enter_context(fleet.servers[1].client())
        begun = ask(one, **LONG)
        turn = begin(fleet.servers[0])
        if sent is signal.SIGTERM:
            assert fleet.servers[0].stop() == 0
        else:
            fleet.servers[0].kill_all()
        for client in others:
            done = ended(client, begun.id)
            assert (done.status, done.usage.output_tokens) == ("incomplete", 400)
        same = ask(others[0], **LONG)
        assert ended(others[0], same.id).output_text == others[1].responses.retrieve(begun.id).output_text
        path = f"/v1/sessions/alone/turns/{turn}"
        eventually(lambda: http.get(path).json()["state"] == "committed")
        assert http.get(path).json()["tokens"] == witness_output([5], 500)


def begin(server: Server) -> str:
    """Starts a turn that goes on although its client leaves. Returns its id."""
    body = {"input": [5], "max_new_tokens": 500, "ignore_eos": True, "on_disconnect": "continue"}
    with server.client(timeout=httpx.Timeout(END_SECONDS)) as http:
        http.post("/v1/sessions", json={"id": "alone"}).raise_for_status()
        with http.stream("POST", "/v1/sessions/alone/turns", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            return str(answer.headers["x-turn-id"])
