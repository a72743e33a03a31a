"""Tokens of texts and messages, and pages that load nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.metadata import version
from typing import Any

import httpx
import pytest

from tenuto.runtime.preparation import MAX_COUNTED
from tenuto.serve.openai.tokens import PIECE
from tests.serve.server import Server


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    return http.post(path, json=body).raise_for_status().json()


def test_a_text_becomes_tokens_and_tokens_become_the_text(http: httpx.Client) -> None:
    there = post(http, "/tokenize", model="witness", prompt="héllo", return_token_strs=True)
    assert there["count"] == len(there["tokens"]) == len(there["token_strs"]) == 6
    assert there["max_model_len"] == 4096
    back = post(http, "/detokenize", tokens=there["tokens"])
    assert back == {"prompt": "héllo", "text": "héllo", "content": "héllo"}
    several = post(http, "/tokenize", prompt=["a", "bc"])
    assert several["count"] == [1, 2]
    assert post(http, "/detokenize", tokens=several["tokens"])["text"] == ["a", "bc"]


def test_tokens_are_shown_as_in_the_vocabulary_which_the_tokenizer_describes(smollm2_server: Server) -> None:
    with httpx.Client(base_url=smollm2_server.url, timeout=60) as there:
        assert post(there, "/tokenize", prompt="a b", return_token_strs=True)["token_strs"] == ["a", "\u0120b"]
        assert post(there, "/tokenize", prompt="a b")["token_strs"] is None
        told = there.get("/tokenizer_info").raise_for_status().json()
    assert (told["eos_token"], told["vocab_size"], told["add_bos_token"]) == ("<|im_end|>", 49152, False)
    assert "add_generation_prompt" in told["chat_template"]


def test_the_load_is_the_number_of_open_turns(http: httpx.Client) -> None:
    assert http.get("/load").raise_for_status().json() == {"server_load": 0}


def test_messages_become_the_tokens_of_their_prompt(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "witness", "messages": messages, "max_tokens": 1}
    used = post(http, "/v1/chat/completions", **body)["usage"]["prompt_tokens"]
    assert post(http, "/tokenize", messages=messages)["count"] == used
    closed = post(http, "/tokenize", messages=messages, add_generation_prompt=False)
    answer = {"role": "assistant", "content": "yes"}
    begun = {"messages": [*messages, answer], "add_generation_prompt": False, "continue_final_message": True}
    text = [post(http, "/detokenize", tokens=post(http, "/tokenize", **begun)["tokens"])["prompt"]]
    text += [post(http, "/detokenize", tokens=closed["tokens"])["prompt"]]
    assert text[0].endswith("yes")
    assert closed["count"] < used
    assert text[1].endswith("<|im_end|>\n")
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert post(http, "/tokenize", messages=messages, tools=tools)["count"] > used


def test_template_variables_are_accepted_except_those_the_request_sets(http: httpx.Client) -> None:
    body = {"model": "witness", "messages": [{"role": "user", "content": "hi", "name": "Ann"}], "max_tokens": 1}
    for path, given in (("/v1/chat/completions", body), ("/tokenize", {"messages": body["messages"]})):
        post(http, path, **given, chat_template_kwargs={"enable_thinking": False})
        refused = http.post(path, json={**given, "chat_template_kwargs": {"messages": []}})
        assert refused.status_code == 400
        assert "chat_template_kwargs have 'messages'" in refused.text


def test_more_tokens_than_fit_a_context_are_returned_and_counted(http: httpx.Client) -> None:
    text = "abc" * PIECE
    told = post(http, "/tokenize", prompt=text, return_token_strs=True)
    assert told["count"] == len(told["tokens"]) == len(text)
    assert "".join(told["token_strs"]) == text
    assert post(http, "/detokenize", tokens=told["tokens"])["text"] == text
    assert post(http, "/tokenize", prompt="")["tokens"] == []


def test_input_much_longer_than_a_context_is_refused_before_it_is_encoded(http: httpx.Client) -> None:
    text = "a" * MAX_COUNTED
    assert post(http, "/tokenize", prompt=text)["count"] == len(text)
    long = {"role": "user", "content": f"{text}a"}
    for path, body in (
        ("/tokenize", {"prompt": f"{text}a"}),
        ("/tokenize", {"messages": [long]}),
        ("/v1/messages/count_tokens", {"model": "witness", "messages": [long]}),
        ("/v1/responses/input_tokens", {"model": "witness", "input": [long]}),
    ):
        told = http.post(path, json=body)
        assert told.status_code == 400
        assert f"allowed where it is only tokenized: {MAX_COUNTED}" in told.text


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"prompt": 7}, {"model": "x", "prompt": "a"}])
def test_anything_but_a_text_is_refused(http: httpx.Client, body: dict[str, Any]) -> None:
    assert http.post("/tokenize", json=body).status_code in (400, 404)


def test_the_version_and_a_ping_need_no_key(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": version("tenuto")}
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200


class Links(HTMLParser):
    """Collects everything that a page refers to, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.targets.append(value)
            if name == "id" and value is not None:
                self.anchors.add(value)
        assert tag not in ("script", "link", "iframe", "img")


def test_the_documentation_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    page, links = http.get("/docs").raise_for_status().text, Links()
    links.feed(page)
    assert not re.search(r"https?://", page)
    assert {target for target in links.targets if not target.startswith("#")} == {"/openapi.json"}
    assert {target[1:] for target in links.targets if target.startswith("#")} <= links.anchors
    for path in http.get("/openapi.json").json()["paths"]:
        assert f"<code>{path}</code>" in page
