"""Fields that vLLM and SGLang add to requests and answers of the OpenAI interface."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tenuto.base.options import TurnParams
from tenuto.base.tools.answers import AnswerReader, Reading
from tenuto.base.tools.definitions import ModelHabits
from tenuto.base.turns import Delta, Message
from tenuto.serve.openai.chat import ChatWriter, Shown
from tenuto.serve.openai.schemas import ChatMessage
from tests.present import present
from tests.serve.openai.calls import GREEDY, HI

IDS = [104, 101, 108]


def extra(part: Any) -> dict[str, Any]:
    return present(part.model_extra)


def tokens(http: httpx.Client, text: str) -> list[int]:
    found: list[int] = http.post("/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]
    return found


def test_answers_show_token_ids_when_asked(client: OpenAI) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "extra_body": {"return_token_ids": True}, **GREEDY}
    done = client.completions.create(prompt=[IDS, IDS[:2]], n=2, **asked)
    assert [extra(choice)["prompt_token_ids"] for choice in done.choices] == [IDS, IDS, IDS[:2], IDS[:2]]
    assert [len(extra(choice)["token_ids"]) for choice in done.choices] == [6] * 4
    again = client.completions.create(prompt=IDS + extra(done.choices[0])["token_ids"][:2], **asked)
    assert extra(again.choices[0])["token_ids"][:4] == extra(done.choices[0])["token_ids"][2:]
    chat = client.chat.completions.create(messages=HI, **asked)
    assert len(extra(chat)["prompt_token_ids"]) == present(chat.usage).prompt_tokens
    assert len(extra(chat.choices[0])["token_ids"]) == 6
    plain = client.chat.completions.create(messages=HI, max_tokens=2, **GREEDY)
    assert extra(plain.choices[0])["token_ids"] is extra(plain)["prompt_token_ids"] is None


def test_only_allowed_tokens_are_sampled_and_named_ones_have_logprobs(client: OpenAI) -> None:
    body = {"allowed_token_ids": [42], "logprob_token_ids": [50, 42, 42], "return_tokens_as_token_ids": True}
    named = {"token_id:42", "token_id:50"}
    done = client.completions.create(prompt=IDS, max_tokens=3, logprobs=5, extra_body=body, **GREEDY)
    shown = present(done.choices[0].logprobs)
    assert shown.tokens == ["token_id:42"] * 3
    assert [set(top) for top in present(shown.top_logprobs)] == [named] * 3
    asked: dict[str, Any] = {"messages": HI, "max_tokens": 3, "logprobs": True, "extra_body": body, **GREEDY}
    entries = present(present(client.chat.completions.create(**asked).choices[0].logprobs).content)
    assert [entry.token for entry in entries] == ["token_id:42"] * 3
    assert [[other.token for other in entry.top_logprobs] for entry in entries] == [["token_id:42", "token_id:50"]] * 3
    unscored = client.completions.create(prompt=IDS, extra_body={"logprob_token_ids": [5]}, **GREEDY)
    assert unscored.choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(prompt=IDS, extra_body={**body, "min_tokens": 2}, **GREEDY)
    assert refused.value.param == "allowed_token_ids"


def test_bad_words_are_not_written(client: OpenAI) -> None:
    def written(*words: str, choices: list[str]) -> set[str]:
        body = {"guided_choice": choices, "bad_words": words}
        done = client.completions.create(model="default", prompt=IDS, n=16, max_tokens=9, extra_body=body)
        return {choice.text for choice in done.choices}

    assert written(choices=["one two", "one six"]) == {"one two", "one six"}
    assert written("t", choices=["one two", "one six"]) == {"one six"}
    assert written("ne s", "x", choices=["one two", "one six", "two"]) == {"one two", "two"}
    with pytest.raises(openai.BadRequestError, match="bad_words") as refused:
        written("two", choices=["one two"])
    assert refused.value.code == "grammar_failed"
    with pytest.raises(openai.BadRequestError) as refused:
        written("", choices=["one two"])
    assert refused.value.param == "bad_words"


def test_a_prompt_is_cut_to_the_tokens_asked_for(client: OpenAI, http: httpx.Client) -> None:
    body: dict[str, Any] = {"return_token_ids": True, "truncate_prompt_tokens": 2}
    asked: dict[str, Any] = {"prompt": [IDS, IDS[:1]], "n": 2, "max_tokens": 2, **GREEDY}
    for side, kept in (("left", IDS[-2:]), ("right", IDS[:2])):
        done = client.completions.create(extra_body={**body, "truncation_side": side}, **asked)
        assert [extra(choice)["prompt_token_ids"] for choice in done.choices] == [kept, kept, IDS[:1], IDS[:1]]
    long = client.completions.create(
        prompt="a" * 9000, max_tokens=6, extra_body={**body, "truncate_prompt_tokens": -1}, **GREEDY
    )
    assert extra(long.choices[0])["prompt_token_ids"] == tokens(http, "a") * 4090
    whole = client.chat.completions.create(messages=HI, max_tokens=1, extra_body={"return_token_ids": True}, **GREEDY)
    chat = client.chat.completions.create(messages=HI, max_tokens=1, extra_body=body, **GREEDY)
    assert extra(chat)["prompt_token_ids"] == extra(whole)["prompt_token_ids"][-2:]
    for wrong in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 2, "session_id": "s"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(prompt="a", extra_body=wrong, **GREEDY)
        assert refused.value.param == "truncate_prompt_tokens"


def test_an_answer_continues_the_last_message(client: OpenAI, http: httpx.Client) -> None:
    begun: list[Any] = [*HI, {"role": "assistant", "content": "Well"}]
    body: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    asked: dict[str, Any] = {"messages": begun, "max_tokens": 3, **GREEDY}
    done = client.chat.completions.create(extra_body=body, **asked)
    assert extra(done)["prompt_token_ids"][-4:] == tokens(http, "Well")
    said = f"Well{done.choices[0].message.content}"
    assert client.chat.completions.create(extra_body={**body, "echo": True}, **asked).choices[0].message.content == said
    chunks = client.chat.completions.create(extra_body={**body, "echo": True}, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
    several = client.chat.completions.create(extra_body=body, n=2, **asked)
    assert {choice.message.content for choice in several.choices} == {done.choices[0].message.content}
    session = {"session_id": "continued"}
    client.chat.completions.create(messages=HI, max_tokens=2, extra_body=session, **GREEDY)
    later = client.chat.completions.create(extra_body={**body, **session}, **asked)
    assert extra(later)["prompt_token_ids"][-4:] == tokens(http, "Well")
    http.delete("/v1/sessions/continued").raise_for_status()
    plain = {"messages": HI, "max_tokens": 3, **GREEDY}
    for wrong, given in (
        ({"continue_final_message": True}, asked),
        (body, plain),
        ({"add_generation_prompt": False, "session_id": "continued"}, asked),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(extra_body=wrong, **given)
        assert refused.value.param in wrong


def test_a_prompt_may_end_with_the_last_message(client: OpenAI, http: httpx.Client) -> None:
    said: list[Any] = [*HI, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "Go on."}]
    body = {"add_generation_prompt": False, "return_token_ids": True}
    for messages in (HI, said[:2], said):
        given = {"messages": messages, "add_generation_prompt": False}
        expected = http.post("/tokenize", json=given).raise_for_status().json()["tokens"]
        for _ in range(2):  # what the first has computed is not taken for the beginning of a conversation
            done = client.chat.completions.create(messages=messages, max_tokens=3, extra_body=body, **GREEDY)
            assert extra(done)["prompt_token_ids"] == expected
            assert done.usage is not None
            assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(expected), 3)


def test_thoughts_of_earlier_messages_may_have_either_name() -> None:
    said = {"role": "assistant", "content": "two"}
    for named in ({"reasoning_content": "one"}, {"reasoning": "one"}, {"reasoning": "one", "reasoning_content": "one"}):
        assert ChatMessage.model_validate(said | named).rendered() == Message("assistant", "two", reasoning="one")
    assert ChatMessage.model_validate(said | {"reasoning": {"text": "one"}}).rendered() == Message("assistant", "two")


def test_one_route_takes_chats_and_completions(http: httpx.Client) -> None:
    given: dict[str, Any] = {"/v1/chat/completions": {"messages": HI}, "/v1/completions": {"prompt": "a"}}
    for path, body in given.items():
        body |= {"max_tokens": 3, "temperature": 0}
        there, here = (http.post(url, json=body).raise_for_status().json() for url in (path, "/invocations"))
        assert (there["object"], there["choices"]) == (here["object"], here["choices"])
    refused = http.post("/invocations", json={"prompt": "a", "max_tokens": "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_tokens_of_thoughts_are_counted() -> None:
    reading = Reading(ModelHabits(thinks="tags"), ())
    pieces = [("<think>", 1), ("\nso", 2), ("", 1), (" it\n</think>", 2), ("\n\nfine", 3), (".", 1)]
    assert reading.thought_tokens(pieces) == 6
    assert reading.thought_tokens([("fine", 3)]) == 0
    assert Reading(ModelHabits(), ()).thought_tokens(pieces) == 0


def test_chunks_have_the_token_ids_of_the_whole_answer_and_one_has_the_prompt(client: OpenAI) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "extra_body": {"return_token_ids": True}, **GREEDY}
    whole = client.completions.create(prompt=IDS, **asked)
    chunks = [extra(chunk.choices[0]) for chunk in client.completions.create(prompt=IDS, stream=True, **asked)]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [IDS] + [None] * (len(chunks) - 1)
    assert [token for chunk in chunks for token in chunk["token_ids"]] == extra(whole.choices[0])["token_ids"]
    chat = client.chat.completions.create(messages=HI, **asked)
    pieces = list(client.chat.completions.create(messages=HI, stream=True, **asked))
    assert extra(pieces[0])["prompt_token_ids"] == extra(chat)["prompt_token_ids"]
    told = [token for piece in pieces for token in extra(piece.choices[0])["token_ids"]]
    assert told == extra(chat.choices[0])["token_ids"]


def test_prompts_have_logprobs_when_asked(client: OpenAI) -> None:
    asked: dict[str, Any] = {"prompt_logprobs": 2}
    echoed = client.completions.create(prompt=IDS, echo=True, logprobs=2, max_tokens=1, **GREEDY)
    scores = present(present(echoed.choices[0].logprobs).token_logprobs)
    done = client.completions.create(prompt=IDS, max_tokens=1, extra_body=asked, **GREEDY)
    first, *rest = extra(done.choices[0])["prompt_logprobs"]
    assert first is None
    assert [entry[str(token)]["logprob"] for token, entry in zip(IDS[1:], rest, strict=True)] == scores[1:3]
    for entry in rest:
        ranked = {score["rank"]: score["logprob"] for score in entry.values()}
        assert ranked[1] == max(score["logprob"] for score in entry.values()), entry
    chat = client.chat.completions.create(messages=HI, max_tokens=1, extra_body=asked, **GREEDY)
    assert len(extra(chat)["prompt_logprobs"]) == present(chat.usage).prompt_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(prompt=IDS, stream=True, extra_body=asked, **GREEDY)
    assert refused.value.param == "prompt_logprobs"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(prompt=IDS, echo=True, logprobs=1, extra_body=asked, **GREEDY)
    assert refused.value.param == "prompt_logprobs"


def test_every_chunk_has_the_usage_so_far_when_asked(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(messages=HI, max_tokens=6, stream=True, stream_options=options, **GREEDY)
    )
    usages = [present(chunk.usage) for chunk in chunks]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert (counts[0], counts[-2:]) == (0, [6, 6])
    assert len({usage.prompt_tokens for usage in usages}) == 1


def test_answers_name_the_stop_that_ended_them(client: OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": IDS, "max_tokens": 6, **GREEDY}
    ids = extra(client.completions.create(extra_body={"return_token_ids": True}, **asked).choices[0])["token_ids"]
    stopped = client.completions.create(extra_body={"stop_token_ids": [ids[2]]}, **asked).choices[0]
    assert stopped.finish_reason == "stop"
    assert (extra(stopped)["matched_stop"], extra(stopped)["stop_reason"]) == (ids[2], ids[2])
    full = client.completions.create(**asked).choices[0]
    assert (extra(full)["matched_stop"], extra(full)["stop_reason"]) == (None, None)


@pytest.mark.parametrize("shown", [True, False])
def test_thoughts_are_left_out_on_request(client: OpenAI, shown: bool) -> None:
    def writer() -> ChatWriter:
        return ChatWriter(AnswerReader(ModelHabits(thinks="tags")), TurnParams(), form=Shown(reasoning=shown))

    text = "<think>one</think>two"
    message = writer().whole(Delta(text=text))["message"]
    assert (message["content"], message.get("reasoning_content")) == ("two", "one" if shown else None)
    assert message.get("reasoning") == message.get("reasoning_content")
    streaming = writer()
    pieces = [piece["delta"] for letter in text if (piece := streaming.piece(Delta(text=letter))) is not None]
    pieces.append(streaming.closing()["delta"])
    assert "".join(piece.get("content", "") for piece in pieces) == "two"
    for name in ("reasoning_content", "reasoning"):
        assert "".join(piece.get(name, "") for piece in pieces) == ("one" if shown else "")
    asked = {"include_reasoning": shown}
    assert client.chat.completions.create(messages=HI, max_tokens=2, extra_body=asked, **GREEDY).choices
