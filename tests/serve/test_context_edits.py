"""Anthropic's `context_management`, used by Anthropic's own client: what it clears is not in the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from anthropic import Anthropic

from bench.clients.caller import write_caller
from tenuto.serve.anthropic.content import NewMessage
from tenuto.serve.anthropic.edits import ClearThinking
from tests.serve.server import Server, serving

READ: Any = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}}
GREP: Any = {**READ, "name": "grep"}
PLACEHOLDER = "[the result of this call was cleared to save context]"


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=witness.url, api_key="none", max_retries=0) as client:
        yield client


def conversation(
    results: list[str], *, thoughts: bool = False, names: tuple[str, ...] = ("read",), argument: str = "a" * 40
) -> list[Any]:
    """Returns messages with a call for each of these results."""
    messages: list[Any] = []
    for number, result in enumerate(results):
        use = {"type": "tool_use", "id": f"c{number}", "name": names[number % len(names)], "input": {"path": argument}}
        thought = [{"type": "thinking", "thinking": f"thought {number}", "signature": ""}] if thoughts else []
        messages += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": [*thought, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"c{number}", "content": result}]},
            {"role": "assistant", "content": [*thought, {"type": "text", "text": "so"}]},
        ]
    return [*messages, {"role": "user", "content": "and now?"}]


LONG = ["x" * 200] * 5


def clear_uses(trigger: int = 100, **more: Any) -> dict[str, Any]:
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": trigger}, **more}
    return {"edits": [edit]}


def ask(client: Anthropic, messages: list[Any], management: Any, **more: Any) -> Any:
    given = {"model": "witness", "max_tokens": 2, "messages": messages, "tools": [READ, GREP], **more}
    return client.beta.messages.create(**given, context_management=management, betas=["context-management-2025-06-27"])


def counted(client: Anthropic, messages: list[Any], **more: Any) -> Any:
    return client.beta.messages.count_tokens(model="witness", messages=messages, tools=[READ, GREP], **more)


def prompt(answer: Any) -> int:
    usage = answer.usage
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


def test_results_of_older_calls_are_cleared_and_reported(client: Anthropic) -> None:
    messages = conversation(LONG)
    answer = ask(client, messages, clear_uses())
    (edit,) = answer.context_management.applied_edits
    assert (edit.type, edit.cleared_tool_uses) == ("clear_tool_uses_20250919", 2)
    whole = counted(client, messages).input_tokens
    assert edit.cleared_input_tokens == whole - prompt(answer) > 0
    assert prompt(answer) == counted(client, conversation([PLACEHOLDER] * 2 + LONG[2:])).input_tokens
    edited = counted(client, messages, context_management=clear_uses())
    assert edited.input_tokens == prompt(answer)
    assert edited.context_management.original_input_tokens == whole


def test_a_stream_reports_the_edits(client: Anthropic) -> None:
    options: dict[str, Any] = {"context_management": clear_uses(), "tools": [READ]}
    with client.beta.messages.stream(
        model="witness", max_tokens=2, messages=conversation(LONG), betas=["x"], **options
    ) as stream:
        final = stream.get_final_message()
    assert final.context_management is not None
    assert [each.type for each in final.context_management.applied_edits] == ["clear_tool_uses_20250919"]


@pytest.mark.parametrize(
    ("more", "cleared"),
    [
        ({"keep": {"type": "tool_uses", "value": 1}}, 4),
        ({"keep": {"type": "tool_uses", "value": 0}}, 5),
        ({"keep": {"type": "tool_uses", "value": 5}}, None),
        ({"trigger": 100_000}, None),
        ({"clear_at_least": {"type": "input_tokens", "value": 50}}, 2),
        ({"clear_at_least": {"type": "input_tokens", "value": 50_000}}, None),
        ({"exclude_tools": ["read"], "keep": {"type": "tool_uses", "value": 0}}, 2),
        ({"exclude_tools": ["read", "grep"], "keep": {"type": "tool_uses", "value": 0}}, None),
    ],
    ids=str,
)
def test_what_is_cleared_follows_the_request(client: Anthropic, more: dict[str, Any], cleared: int | None) -> None:
    messages = conversation(LONG, names=("read", "grep"))
    answer = ask(client, messages, clear_uses(**more))
    edits = answer.context_management.applied_edits
    assert [edit.cleared_tool_uses for edit in edits] == ([cleared] if cleared else [])
    assert (prompt(answer) < counted(client, messages).input_tokens) == bool(cleared)


@pytest.mark.parametrize(("value", "cleared"), [(4, 2), (5, None)])
def test_a_number_of_calls_may_trigger_clearing(client: Anthropic, value: int, cleared: int | None) -> None:
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": value}}
    answer = ask(client, conversation(LONG), {"edits": [edit]})
    edits = answer.context_management.applied_edits
    assert [edit.cleared_tool_uses for edit in edits] == ([cleared] if cleared else [])


def test_results_that_are_shorter_than_their_replacement_stay(client: Anthropic) -> None:
    assert ask(client, conversation(["4"] * 5), clear_uses()).context_management.applied_edits == []


@pytest.mark.parametrize(("chosen", "grep_cleared", "read_cleared"), [(True, True, True), (["grep"], True, False)])
def test_arguments_of_cleared_calls_are_cleared_on_request(
    client: Anthropic, chosen: Any, grep_cleared: bool, read_cleared: bool
) -> None:
    management = clear_uses(keep={"type": "tool_uses", "value": 0}, clear_tool_inputs=chosen)
    for name, inputs_cleared in (("grep", grep_cleared), ("read", read_cleared)):
        lengths = [
            prompt(ask(client, conversation(LONG, names=(name,), argument="a" * size), management))
            for size in (40, 400)
        ]
        assert (lengths[0] == lengths[1]) == inputs_cleared


@pytest.mark.parametrize(
    ("keep", "cleared"),
    [
        (None, 4),
        ({"type": "thinking_turns", "value": 2}, 3),
        ({"type": "thinking_turns", "value": 9}, None),
        ("all", None),
        ({"type": "all"}, None),
    ],
    ids=str,
)
def test_thoughts_of_older_turns_are_cleared(client: Anthropic, keep: Any, cleared: int | None) -> None:
    messages = conversation(LONG, thoughts=True)
    edit = {"type": "clear_thinking_20251015", **({"keep": keep} if keep is not None else {})}
    answer = ask(client, messages, {"edits": [edit]})
    edits = answer.context_management.applied_edits
    assert [edit.cleared_thinking_turns for edit in edits] == ([cleared] if cleared else [])
    saved = sum(edit.cleared_input_tokens for edit in edits)
    assert prompt(answer) == counted(client, messages).input_tokens - saved


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Anthropic]:
    """A client of a model whose template writes earlier thoughts."""
    model = write_caller(tmp_path_factory.mktemp("thinker") / "model", "read", {}, thoughts=["It is", " done."])
    with (
        serving("--model", str(model), "--context-length", "8192", "--any-model-name") as server,
        Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize(("kept", "left"), [(1, [0, 0, 1]), (2, [0, 1, 1]), (9, [1, 1, 1])])
def test_cleared_thoughts_are_not_computed(thinker: Anthropic, kept: int, left: list[int]) -> None:
    """Each thought takes as many tokens as there are bytes in it and the text around it."""
    keep = {"type": "thinking_turns", "value": kept}
    messages, edits = conversation(LONG[:3], thoughts=True), [{"type": "clear_thinking_20251015", "keep": keep}]
    answer = ask(thinker, messages, {"edits": edits}, max_tokens=16)
    tokens = [2 * len(f"<think>\nthought {number}\n</think>\n\n") for number in range(3)]
    saved = sum(size for size, there in zip(tokens, left, strict=True) if not there)
    assert prompt(answer) == counted(thinker, messages).input_tokens - saved
    assert [edit.cleared_input_tokens for edit in answer.context_management.applied_edits] == ([saved] if saved else [])
    assert [block.type for block in answer.content] == ["thinking", "text"]


def test_cleared_thoughts_are_not_rendered_and_all_else_is() -> None:
    given = [NewMessage.model_validate(message) for message in conversation(LONG[:3], thoughts=True)]
    edited, _ = ClearThinking.model_validate({"type": "clear_thinking_20251015"}).edited(given)
    whole, rest = ([one for message in each for one in message.rendered()] for each in (given, edited))
    assert [one.reasoning for one in rest if one.reasoning] == ["thought 2"] * 2  # the call and the text of one turn
    assert [replace(one, reasoning="") for one in rest] == [replace(one, reasoning="") for one in whole]


def test_edits_are_made_one_after_the_other(client: Anthropic) -> None:
    edits = [{"type": "clear_thinking_20251015"}, *clear_uses()["edits"]]
    messages = conversation(LONG, thoughts=True)
    answer = ask(client, messages, {"edits": edits})
    made = answer.context_management.applied_edits
    assert [edit.type for edit in made] == [edit["type"] for edit in edits]
    assert prompt(answer) == counted(client, messages).input_tokens - sum(edit.cleared_input_tokens for edit in made)


def test_a_prompt_that_is_too_long_fits_once_it_is_edited(client: Anthropic, http: httpx.Client) -> None:
    messages = conversation(["x" * 3000] * 5)
    body = {"model": "witness", "max_tokens": 2, "messages": messages, "tools": [READ]}
    assert "prompt is too long" in http.post("/v1/messages", json=body).json()["error"]["message"]
    kept = {"type": "tool_uses", "value": 0}
    assert ask(client, messages, clear_uses(keep=kept)).context_management.applied_edits[0].cleared_tool_uses == 5


@pytest.mark.parametrize(
    ("management", "named"),
    [
        ({"edits": [{"type": "forget"}]}, "context_management.edits[0].type"),
        ({"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "tool_uses", "value": 1}}]}, "keep"),
        ({"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": -1}}]}, "keep.value"),
        ({"edits": [{"type": "clear_tool_uses_20250919", "trigger": 5}]}, "trigger"),
        ({"edits": [{"type": "compact_20260112", "trigger": {"type": "tool_uses", "value": 1}}]}, "trigger.type"),
        ({"edits": [{"type": "compact_20260112", "instructions": ""}]}, "instructions"),
        ({"edits": 5}, "context_management.edits"),
        (5, "context_management"),
    ],
    ids=str,
)
def test_an_impossible_edit_is_refused_by_its_field(http: httpx.Client, management: Any, named: str) -> None:
    body = {"model": "witness", "max_tokens": 2, "messages": conversation(LONG), "context_management": management}
    answer = http.post("/v1/messages", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert named in answer.json()["error"]["message"]


def test_edits_of_threads_are_refused_in_the_form_that_clients_expect(http: httpx.Client) -> None:
    body = {"model": "witness", "max_tokens": 2, "messages": conversation(LONG), "tools": [READ]}
    answer = http.post("/v1/messages", json={**body, "thread": {"type": "create"}, "context_management": clear_uses()})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["context_management"]}
