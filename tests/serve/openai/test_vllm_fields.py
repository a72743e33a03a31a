"""Fields that vLLM and SGLang add to requests and answers of the OpenAI interface."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from tenuto.base.options import TurnParams
from tenuto.base.tools.answers import AnswerReader
from tenuto.base.tools.definitions import ModelHabits
from tenuto.base.turns import Delta
from tenuto.serve.openai.chat import ChatWriter
from tests.present import present
from tests.serve.openai.calls import GREEDY, HI

IDS = [104, 101, 108]


def extra(part: Any) -> dict[str, Any]:
    return present(part.model_extra)


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
    assert "token_ids" not in extra(client.chat.completions.create(messages=HI, max_tokens=2, **GREEDY).choices[0])


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
        return ChatWriter(AnswerReader(ModelHabits(thinks="tags")), TurnParams(), reasoning=shown)

    text = "<think>one</think>two"
    message = writer().whole(Delta(text=text))["message"]
    assert (message["content"], message.get("reasoning_content")) == ("two", "one" if shown else None)
    streaming = writer()
    pieces = [piece["delta"] for letter in text if (piece := streaming.piece(Delta(text=letter))) is not None]
    pieces.append(streaming.closing()["delta"])
    assert "".join(piece.get("content", "") for piece in pieces) == "two"
    assert "".join(piece.get("reasoning_content", "") for piece in pieces) == ("one" if shown else "")
    asked = {"include_reasoning": shown}
    assert client.chat.completions.create(messages=HI, max_tokens=2, extra_body=asked, **GREEDY).choices
