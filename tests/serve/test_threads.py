"""Anthropic's threads, used by Anthropic's own client: the server keeps conversations as sessions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic, beta_tool

from tests.eventually import eventually
from tests.serve.server import Server, serving

HI: list[Any] = [{"role": "user", "content": "a question of some length, to begin with"}]
MORE: Any = {"role": "user", "content": "and?"}
BETA = "message-threads-2026-08-12"
READ: Any = {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object", "properties": {}}}


def client_of(server: Server) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[Anthropic]:
    with client_of(witness) as client:
        yield client


def ask(client: Anthropic, thread: Any, messages: list[Any] = HI, **options: Any) -> Any:
    given = {"model": "witness", "messages": messages, "max_tokens": 16, "thread": thread, "betas": [BETA], **options}
    return client.beta.messages.create(**given)


def go_on(client: Anthropic, message_id: str, **options: Any) -> Any:
    return ask(client, {"type": "continue", "previous_message_id": message_id}, [MORE], **options)


def prompt(answer: Any) -> int:
    """Returns the number of tokens of the whole prompt."""
    usage = answer.usage
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


def error_of(refused: Any) -> tuple[int, str]:
    return refused.value.status_code, refused.value.body["error"]["details"]["error_code"]


def test_a_continued_thread_computes_only_its_new_tokens(client: Anthropic) -> None:
    first = ask(client, {"type": "create"}, system="Be brief.")
    second = go_on(client, first.id)
    third = go_on(client, second.id, stream=False)
    for before, after in ((first, second), (second, third)):
        known = prompt(before) + before.usage.output_tokens
        assert after.usage.cache_read_input_tokens >= known - 1
        assert known < prompt(after) < known + 40


def test_the_clients_thread_is_never_replayed(
    client: Anthropic, caplog: pytest.LogCaptureFixture, witness: Server
) -> None:
    caplog.set_level(logging.INFO, "anthropic")
    thread = client.beta.messages.thread(model="witness", max_tokens=8, system="Be brief.", tools=[READ])
    sent = [thread.send(*HI), thread.send(MORE)]
    with thread.stream(MORE) as stream:
        said = "".join(stream.text_stream)
        sent.append(stream.get_final_message())
    assert sent[-1].content[0].text == said
    assert thread.previous_message_id == sent[-1].id
    assert len({each.id.rpartition("_")[0] for each in sent}) == 1
    assert not [line for line in caplog.messages if "eplaying" in line or "without a thread" in line]
    with witness.client() as http:
        assert http.get(f"/v1/sessions/{sent[0].id.rpartition('_')[0]}").json()["version"] == 3


def test_a_tool_loop_runs_on_one_thread(client: Anthropic) -> None:
    @beta_tool
    def weather(day: int) -> str:
        """The weather of a day, 1 to 9."""
        return f"{day} degrees"

    runner = client.beta.messages.tool_runner(
        model="witness",
        max_tokens=200,
        tools=[weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        messages=HI,
        max_iterations=3,
    )
    answers = list(runner)
    assert [answer.stop_reason for answer in answers] == ["tool_use"] * 3
    assert len({answer.id.rpartition("_")[0] for answer in answers}) == 1
    assert (answers[2].usage.cache_read_input_tokens or 0) >= prompt(answers[1])


def test_a_message_is_continued_only_once(client: Anthropic) -> None:
    first = ask(client, {"type": "create"})
    go_on(client, first.id)
    with pytest.raises(anthropic.BadRequestError, match="has been continued already") as refused:
        go_on(client, first.id)
    assert error_of(refused) == (400, "thread_already_continued")


@pytest.mark.parametrize("name", ["msg_x", "msg_" + "0" * 32 + "_1", "msg_" + "0" * 32 + "_0", "é"])
def test_an_unknown_message_cannot_be_continued(client: Anthropic, name: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="send all messages") as refused:
        go_on(client, name)
    assert error_of(refused) == (404, "thread_not_found")


def test_a_message_that_is_not_of_this_thread_yet_is_not_found(client: Anthropic) -> None:
    first = ask(client, {"type": "create"})
    with pytest.raises(anthropic.NotFoundError) as refused:
        go_on(client, first.id.removesuffix("1") + "2")
    assert error_of(refused) == (404, "thread_not_found")


def test_a_message_cannot_be_continued_twice_at_once(slow_witness: Server) -> None:
    with client_of(slow_witness) as client:
        first = ask(client, {"type": "create"}, max_tokens=2)
        with go_on(client, first.id, max_tokens=3000, stream=True) as running:
            assert next(iter(running)).type == "message_start"
            with pytest.raises(anthropic.BadRequestError, match="another request is continuing") as refused:
                go_on(client, first.id)
            assert error_of(refused) == (400, "thread_continue_in_flight")
        session = f"{slow_witness.url}/v1/sessions/{first.id.rpartition('_')[0]}"
        eventually(lambda: httpx.get(session, timeout=60).json()["turn"] is None)  # the turn is rolled back
        assert go_on(client, first.id, max_tokens=2).content


def test_a_thread_whose_first_answer_is_refused_or_left_leaves_no_session(slow_witness: Server) -> None:
    def sessions() -> set[str]:
        return {each["id"] for each in httpx.get(f"{slow_witness.url}/v1/sessions", timeout=60).json()["data"]}

    before = sessions()
    with client_of(slow_witness) as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            ask(client, {"type": "create"}, [{"role": "user", "content": "word " * 9000}])
        with ask(client, {"type": "create"}, max_tokens=3000, stream=True) as running:
            assert next(iter(running)).type == "message_start"
            assert len(sessions()) == len(before) + 1
    eventually(lambda: sessions() == before)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"thread": {"type": "continue"}}, "thread.previous_message_id"),
        ({"thread": {"type": "create", "previous_message_id": "x"}}, "thread.previous_message_id"),
        ({"thread": {"type": "fork"}}, "thread.type"),
        ({"thread": True}, "thread"),
        ({"system": "Be long."}, "system"),
        ({"tools": [READ]}, "tools"),
    ],
    ids=str,
)
def test_an_impossible_thread_is_refused_by_its_field(
    client: Anthropic, witness: Server, fields: dict[str, Any], named: str
) -> None:
    first = ask(client, {"type": "create"}, max_tokens=1)
    thread = {"type": "continue", "previous_message_id": first.id}
    body = {"model": "witness", "messages": [MORE], "max_tokens": 5, "thread": thread, **fields}
    answer = httpx.post(f"{witness.url}/v1/messages", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert named in answer.json()["error"]["message"]
    assert go_on(client, first.id, max_tokens=1).id  # the thread is as before


def test_a_system_message_may_begin_the_new_messages(client: Anthropic) -> None:
    first = ask(client, {"type": "create"})
    thread = {"type": "continue", "previous_message_id": first.id}
    assert ask(client, thread, [{"role": "system", "content": "It is late."}, MORE]).content


def test_a_thread_continues_after_a_restart_with_a_journal(tmp_path: Path) -> None:
    arguments = ("--model", "witness", "--context-length", "1024", "--journal", str(tmp_path / "journal"))
    with serving(*arguments) as server, client_of(server) as client:
        plain, with_tools = ask(client, {"type": "create"}), ask(client, {"type": "create"}, tools=[READ])
    with serving(*arguments) as server, client_of(server) as client:
        second = go_on(client, plain.id)
        assert prompt(second) > prompt(plain) + plain.usage.output_tokens
        with pytest.raises(anthropic.BadRequestError, match="continued already"):
            go_on(client, plain.id)
        with pytest.raises(anthropic.NotFoundError, match="has not kept the thread"):
            go_on(client, with_tools.id)
        server.audit()


def test_threads_belong_to_tenants(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f"[[keys]]\ntenant = '{name}'\nkey = '{name}-key'\n" for name in ("alice", "bob")))
    with serving("--model", "witness", "--context-length", "512", "--keys", str(keys)) as server:
        alice, bob = (Anthropic(base_url=server.url, api_key=f"{name}-key", max_retries=0) for name in ("alice", "bob"))
        with alice, bob:
            first = ask(alice, {"type": "create"}, max_tokens=2)
            with pytest.raises(anthropic.NotFoundError) as refused:
                go_on(bob, first.id)
            assert error_of(refused) == (404, "thread_not_found")
            assert go_on(alice, first.id, max_tokens=2).id
