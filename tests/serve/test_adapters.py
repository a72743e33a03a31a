"""Adapters over HTTP: loaded at the start and later, and chosen by model name in every interface."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenuto.memory.tiers.unit_files import INDEX
from tests.eventually import eventually
from tests.serve.server import serving

MESSAGES = [{"role": "user", "content": "What is tea, and who drinks it in the morning and in the evening?"}]


@pytest.fixture(scope="module")
def adapted() -> Iterator[httpx.Client]:
    """A client of a server that has two adapters from the start."""
    flags = ("--lora-modules", "poet=/poet", "--lora-modules", "clerk=/clerk")
    with serving("--model", "witness", "--context-length", "2048", *flags) as server, server.client() as client:
        yield client
        server.audit()


def chat(client: httpx.Client, model: str | None = None, **more: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "model": model, **more}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def load(client: httpx.Client, name: str, path: str, **more: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_models_lists_adapters_with_their_parent(adapted: httpx.Client) -> None:
    listed = {each["id"]: each for each in adapted.get("/v1/models").json()["data"]}
    assert list(listed) == ["witness", "poet", "clerk"]
    assert (listed["poet"]["parent"], listed["poet"]["root"]) == ("witness", "/poet")
    assert listed["witness"]["parent"] is None
    assert adapted.get("/v1/models/poet").json() == listed["poet"]
    theirs = adapted.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
    assert [each["id"] for each in theirs] == list(listed)


def test_a_model_name_chooses_the_adapter_in_every_interface(adapted: httpx.Client) -> None:
    """The same prompt has three continuations: by the model and by each adapter. Interfaces agree on each."""
    for model in ("witness", "poet", "clerk"):
        answer = chat(adapted, model)
        assert answer["model"] == model
        body = {"model": model, "max_tokens": 6, "messages": MESSAGES, "temperature": 0}
        message = adapted.post("/v1/messages", json=body).json()
        response = adapted.post(
            "/v1/responses",
            json={"model": model, "input": MESSAGES, "max_output_tokens": 6, "temperature": 0, "store": False},
        ).json()
        assert (message["model"], response["model"]) == (model, model)
        assert message["content"][0]["text"] == said(answer) == response["output"][0]["content"][0]["text"]
        several = chat(adapted, model, n=2)
        assert said(several) == said(answer)
    assert len({said(chat(adapted, model)) for model in (None, "poet", "clerk")}) == 3
    assert said(chat(adapted)) == said(chat(adapted, "default")) == said(chat(adapted, "witness"))


def test_prefixes_are_shared_only_within_an_adapter(adapted: httpx.Client) -> None:
    text = "x" * 200

    def cached(model: str) -> int:
        body = {"model": model, "prompt": text, "max_tokens": 1}
        return adapted.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(model) for model in ("poet", "clerk", "witness")] == [0, 0, 0]
    assert min(cached(model) for model in ("poet", "clerk", "witness")) > 0


def test_a_session_keeps_its_adapter_and_its_forks_have_it(adapted: httpx.Client) -> None:
    adapted.post("/v1/sessions", json={"id": "ode", "adapter": "poet"})
    turn = {"input": MESSAGES, "max_new_tokens": 6, "stream": False}
    first = adapted.post("/v1/sessions/ode/turns", json=turn).json()
    assert first["text"] == said(chat(adapted, "poet"))
    child = adapted.post("/v1/sessions/ode/fork", json={"id": "ode-too"}).json()
    assert child["adapter"] == "poet"
    again = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "session_id": "ode"}
    theirs = adapted.post("/v1/chat/completions", json={**again, "model": "poet"}).json()
    for model in ("clerk", "witness"):
        refused = adapted.post("/v1/chat/completions", json={**again, "model": model})
        assert refusal(refused) == (409, "illegal_transition")
    ours = adapted.post("/v1/sessions/ode-too/turns", json={**turn, "max_new_tokens": 4}).json()
    assert ours["text"] == said(theirs)


def test_a_session_that_a_chat_opens_has_the_chats_adapter(adapted: httpx.Client) -> None:
    answer = chat(adapted, "clerk", session_id="ledger")
    assert adapted.get("/v1/sessions/ledger").json()["adapter"] == "clerk"
    assert said(answer) == said(chat(adapted, "clerk"))
    assert adapted.post("/v1/sessions", json={"adapter": "nobody"}).json()["error"]["code"] == "model_not_found"


def test_embeddings_and_scores_are_those_of_the_adapter(adapted: httpx.Client) -> None:
    vectors = []
    for model in ("witness", "poet", "clerk"):
        answer = adapted.post("/v1/embeddings", json={"model": model, "input": "tea"}).json()
        assert answer["model"] == model
        vectors.append(answer["data"][0]["embedding"])
        scored = adapted.post("/v1/score", json={"model": model, "text_1": "tea", "text_2": ["cup"]}).json()
        assert scored["model"] == model
    assert len({tuple(vector) for vector in vectors}) == 3


def test_responses_go_on_with_their_adapter(adapted: httpx.Client) -> None:
    body = {"input": "a", "max_output_tokens": 3, "temperature": 0}
    first = adapted.post("/v1/responses", json={**body, "model": "poet"}).json()
    more = {**body, "previous_response_id": first["id"]}
    assert adapted.post("/v1/responses", json={**more, "model": "poet"}).status_code == 200
    assert refusal(adapted.post("/v1/responses", json={**more, "model": "clerk"})) == (409, "illegal_transition")


def test_lora_path_chooses_in_sglangs_interface(adapted: httpx.Client) -> None:
    def generate(**more: Any) -> Any:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0}, **more}
        return adapted.post("/generate", json=body)

    outputs = {name: generate(lora_path=name).json()["output_ids"] for name in (None, "poet", "clerk")}
    assert len({tuple(output) for output in outputs.values()}) == 3
    assert generate(model="poet").json()["output_ids"] == outputs["poet"]
    both = generate(input_ids=[[5, 6, 7]] * 2, lora_path=["poet", "clerk"]).json()
    assert [each["output_ids"] for each in both] == [outputs["poet"], outputs["clerk"]]
    assert refusal(generate(lora_path="nobody"))[0] == 404
    for streaming in (False, True):
        own = {"lora_path": "poet"} if streaming else {}
        session = adapted.post("/open_session", json={"capacity_of_str_len": 0, "streaming": streaming, **own}).json()
        params = {"session_params": {"id": session}, "lora_path": "poet"}
        assert generate(**params).json()["output_ids"] == outputs["poet"]


def test_exported_sessions_name_their_adapter(adapted: httpx.Client) -> None:
    adapted.post("/v1/sessions", json={"id": "away", "adapter": "poet"})
    adapted.post("/v1/sessions/away/append", json={"input": MESSAGES})
    exported = adapted.get("/v1/sessions/away/export").json()
    assert exported["adapter"]["name"] == "poet"
    imported = adapted.post("/v1/sessions/import", params={"id": "back"}, json=exported)
    assert (imported.status_code, imported.json()["adapter"]) == (201, "poet")
    elsewhere = {**exported, "adapter": {**exported["adapter"], "digest": "0"}}
    assert adapted.post("/v1/sessions/import", params={"id": "no"}, json=elsewhere).status_code == 400
    state = adapted.get("/v1/sessions/away/export/state").content
    octets = {"content-type": "application/octet-stream"}
    moved = adapted.post("/v1/sessions/import/state", params={"id": "whole"}, content=state, headers=octets)
    assert moved.status_code == 201, moved.text
    assert moved.json()["adapter"] == "poet"
    assert moved.json()["computed"] > 0
    adapted.post("/v1/sessions", json={"id": "plain"})
    plain = adapted.get("/v1/sessions/plain/export").json()
    assert "adapter" not in plain
    assert adapted.post("/v1/sessions/import", params={"id": "p"}, json={**plain, "adapter": None}).status_code == 400


def test_adapters_come_go_and_are_replaced_while_the_server_runs(adapted: httpx.Client) -> None:
    assert load(adapted, "judge", "/judge").text == "Success: LoRA adapter 'judge' added successfully."
    adapted.post("/v1/sessions", json={"id": "case", "adapter": "judge"})
    turn = {"input": [5, 6, 7], "max_new_tokens": 3, "stream": False}
    assert adapted.post("/v1/sessions/case/turns", json=turn).status_code == 200
    before = said(chat(adapted, "judge"))
    assert refusal(load(adapted, "judge", "/other")) == (409, "already_exists")
    assert load(adapted, "judge", "/other", load_inplace=True).status_code == 200
    assert said(chat(adapted, "judge")) != before
    assert refusal(adapted.post("/v1/sessions/case/turns", json=turn)) == (409, "adapter_not_loaded")
    answer = adapted.post("/load_lora_adapter", json={"lora_name": "old", "lora_path": "/judge"}).json()
    assert answer["loaded_adapters"] == {"poet": "/poet", "clerk": "/clerk", "judge": "/other", "old": "/judge"}
    assert adapted.post("/v1/sessions/case/turns", json=turn).json()["usage"]["cached_tokens"] > 0
    assert unload(adapted, "old").text == "Success: LoRA adapter 'old' removed successfully."
    assert "judge" not in adapted.post("/unload_lora_adapter", json={"lora_name": "judge"}).json()["loaded_adapters"]
    body = {"messages": MESSAGES, "model": "judge"}
    assert refusal(adapted.post("/v1/chat/completions", json=body)) == (404, "model_not_found")


def test_requests_name_the_weights_of_a_session_whatever_their_name_is_by_now(adapted: httpx.Client) -> None:
    load(adapted, "guide", "/first")
    adapted.post("/v1/sessions", json={"id": "tour", "adapter": "guide"})
    first = said(chat(adapted, "guide"))
    load(adapted, "guide-1", "/first")
    load(adapted, "guide", "/second", load_inplace=True)
    refused = adapted.post("/v1/chat/completions", json={"messages": MESSAGES, "model": "guide", "session_id": "tour"})
    assert refusal(refused) == (409, "illegal_transition")
    assert "other weights" in refused.json()["error"]["message"]
    assert said(chat(adapted, "guide-1", session_id="tour")) == first
    for name in ("guide", "guide-1"):
        unload(adapted, name)


def test_a_conversation_does_not_go_on_with_the_weights_that_an_adapter_had_before(adapted: httpx.Client) -> None:
    load(adapted, "guide", "/first")
    answer = {"role": "assistant", "content": said(chat(adapted, "guide", user="tourist"))}
    load(adapted, "guide-1", "/first")
    load(adapted, "guide", "/second", load_inplace=True)
    messages = [*MESSAGES, answer, {"role": "user", "content": "and then?"}]
    expected = said(chat(adapted, "guide", messages=messages))
    assert expected != said(chat(adapted, "guide-1", messages=messages))
    assert said(chat(adapted, "guide", messages=messages, user="tourist")) == expected
    for name in ("guide", "guide-1"):
        unload(adapted, name)


def test_what_cannot_be_loaded_or_unloaded_is_refused(adapted: httpx.Client) -> None:
    for name in ("witness", "default"):
        assert refusal(load(adapted, name, "/x")) == (400, "invalid_request")
    missing = load(adapted, "new", "missing")
    assert refusal(missing) == (400, "invalid_request")
    assert missing.json()["error"]["param"] == "lora_path"
    assert refusal(unload(adapted, "new")) == (404, "not_found")


def test_an_adapter_with_an_open_turn_is_not_unloaded() -> None:
    with serving("--model", "witness:0.02", "--context-length", "2048") as server, server.client() as client:
        load(client, "slow", "/slow")
        body = {"model": "slow", "prompt": "a", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_lines())
            refused = unload(client, "slow")
            assert refusal(refused) == (409, "adapter_busy")
            assert "is 1" in refused.json()["error"]["message"]
        server.audit()


def test_loading_needs_an_admin_key() -> None:
    flags = ("--api-key", "user", "--admin-api-key", "admin", "--lora-modules", "poet=/poet")
    with serving("--model", "witness", *flags) as server, server.client() as client:
        client.headers["authorization"] = "Bearer user"
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            assert client.post(path, json={"lora_name": "a", "lora_path": "/a"}).status_code == 403
        for path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            assert client.post(path, json={"lora_name": "poet"}).status_code == 403
        assert client.get("/v1/models/poet").json()["root"] == "poet"
        client.headers["authorization"] = "Bearer admin"
        assert load(client, "a", "/a").status_code == 200


def test_a_journaled_session_waits_for_its_adapter(tmp_path: Path) -> None:
    journal = ("--model", "witness", "--journal", str(tmp_path / "journal"))
    turn = {"input": [5, 6, 7], "max_new_tokens": 3, "stream": False}
    with serving(*journal, "--lora-modules", "poet=/poet") as server, server.client() as client:
        client.post("/v1/sessions", json={"id": "ode", "adapter": "poet"})
        first = client.post("/v1/sessions/ode/turns", json=turn).json()
        server.stop()
    with serving(*journal) as server, server.client() as client:
        assert client.get("/v1/sessions/ode").json()["tokens"] == 6
        refused = client.post("/v1/sessions/ode/turns", json=turn)
        assert refusal(refused) == (409, "adapter_not_loaded")
        assert "'poet'" in refused.json()["error"]["message"]
        load(client, "poet", "/poet")
        client.post("/v1/sessions/ode/rewind", json={"turn": 0})
        assert client.post("/v1/sessions/ode/turns", json=turn).json()["tokens"] == first["tokens"]


def test_saved_state_of_a_killed_server_comes_back_under_its_own_adapter(tmp_path: Path) -> None:
    """Then the index of the state is changed so that it names other sessions' state."""
    tier = tmp_path / "tier"
    kept = ("--journal", str(tmp_path / "journal"), "--disk-tier", str(tier))
    adapters = {"plain": None, "ode": "poet", "ledger": "clerk"}
    turn = {"input": [*range(1, 200)], "max_new_tokens": 3, "stream": False}

    def continued(client: httpx.Client, **more: Any) -> dict[str, dict[str, Any]]:
        return {name: client.post(f"/v1/sessions/{name}/turns", json={**turn, **more}).json() for name in adapters}

    def modules(*names: str) -> list[str]:
        return [word for name in names for word in ("--lora-modules", f"{name}=/{name}")]

    with serving("--model", "witness", *kept, *modules("poet", "clerk")) as server, server.client() as client:
        for name, adapter in adapters.items():
            client.post("/v1/sessions", json={"id": name, "adapter": adapter}).raise_for_status()
        first = continued(client)
        assert len({str(answer["tokens"]) for answer in first.values()}) == 3
        eventually(lambda: saved_sessions(tier) == 3)
        server.kill_all()
    with serving("--model", "witness", *kept, *modules("clerk", "poet")) as server, server.client() as client:
        second = continued(client, input=[5])
        assert [answer["usage"]["cached_tokens"] for answer in second.values()] == [201] * 3
        for name in adapters:
            client.post(f"/v1/sessions/{name}/rewind", json={"turn": 1}).raise_for_status()
        eventually(lambda: saved_sessions(tier) == 3)
        server.kill_all()
    with sqlite3.connect(tier / INDEX) as index:
        index.execute("UPDATE sessions SET name = name || '.'")
        for name, other in zip(adapters, [*adapters][1:] + [*adapters][:1], strict=True):
            index.execute("UPDATE sessions SET name = ? WHERE name = ?", (name, f"{other}."))
    with serving("--model", "witness", *kept, *modules("poet", "clerk")) as server, server.client() as client:
        third = continued(client, input=[5])
        assert [answer["usage"]["cached_tokens"] for answer in third.values()] == [0] * 3
        assert [answer["tokens"] for answer in third.values()] == [answer["tokens"] for answer in second.values()]
        assert 'tenuto_snapshots_total{outcome="stale"} 3' in client.get("/metrics").text
        server.audit()


def saved_sessions(tier: Path) -> int:
    """Returns the number of sessions whose state of 201 tokens, or more, is in the index."""
    with closing(sqlite3.connect(tier / INDEX)) as index:
        return index.execute("SELECT count(*) FROM sessions WHERE position >= 201").fetchone()[0]


def test_an_adapter_that_cannot_be_read_ends_the_start() -> None:
    for flag, words in (
        ("poet=missing", "there is no adapter"),
        ("poet", "NAME=PATH"),
        ("witness=/a", "name of the model"),
    ):
        with pytest.raises(RuntimeError, match=words), serving("--model", "witness", "--lora-modules", flag):
            pass


def test_batches_of_messages_take_adapters(adapted: httpx.Client) -> None:
    params = {"model": "poet", "max_tokens": 6, "messages": MESSAGES, "temperature": 0}
    batch = adapted.post("/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": params}]}).json()
    path = f"/v1/messages/batches/{batch['id']}"
    eventually(lambda: adapted.get(path).json()["processing_status"] == "ended")
    line = json.loads(adapted.get(f"{path}/results").text)
    assert line["result"]["message"]["content"][0]["text"] == said(chat(adapted, "poet"))
