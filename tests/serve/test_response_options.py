"""Options of Responses: log-probabilities, sampling, and variables of the template."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tenuto.base.sampling import TokenLogprob
from tenuto.base.tools.answers import Reading
from tenuto.base.tools.definitions import ModelHabits
from tenuto.base.turns import Delta, joined
from tenuto.base.wire.messages import StartTurn
from tenuto.serve.openai.response_answers import Form, ResponseAnswer
from tenuto.serve.shared.live_turn import LiveTurn
from tests.serve.server import Server

SCORED = "message.output_text.logprobs"


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{witness.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, **options: Any) -> Any:
    given = {"model": "default", "input": "hi", "max_output_tokens": 12, "temperature": 0, "store": False, **options}
    return client.responses.create(**given)


def test_a_response_has_the_logprobs_that_a_chat_has(smollm2_server: Server) -> None:
    with OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none", max_retries=0) as client:
        chat: Any = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=12,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
        )
        scores = [entry.to_dict() for entry in chat.choices[0].logprobs.content]
        expected = [entry for entry in scores if entry["token"] != "<|im_end|>"]  # which is not part of the text
        assert expected
        whole = ask(client, include=[SCORED], top_logprobs=2)
        assert [entry.to_dict() for entry in whole.output[0].content[0].logprobs] == expected
        events = list(ask(client, include=[SCORED], top_logprobs=2, stream=True))
        streamed = [entry for event in events if event.type.endswith("text.delta") for entry in event.logprobs]
        (done,) = [event for event in events if event.type.endswith("text.done")]
        final = events[-1].response.output[0].content[0].logprobs
        for entries in (streamed, done.logprobs, final):
            assert [entry.to_dict() for entry in entries] == expected


def test_logprobs_are_shown_only_if_included(client: OpenAI) -> None:
    response = ask(client, top_logprobs=3)
    assert (response.output[0].content[0].logprobs, response.top_logprobs) == (None, 3)
    scored = ask(client, include=[SCORED, "reasoning.encrypted_content"]).output[0].content[0].logprobs
    assert [entry.top_logprobs for entry in scored] == [[]] * 12
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, include=[SCORED], top_logprobs=21)
    assert refused.value.param == "top_logprobs"


def test_tokens_of_thoughts_have_no_logprobs() -> None:
    turn = LiveTurn(StartTurn(kind="turn", tenant=""))
    for token, piece in enumerate(("<think>", "hm", "</think>", "\n", "yes", "!")):
        turn.deltas.append(Delta((token,), piece, logprobs=(TokenLogprob(token, -1.0, raw=piece.encode()),)))
    edge: Any = SimpleNamespace(served_name="x", model=SimpleNamespace(eos_ids=()))
    form = Form(Reading(ModelHabits(thinks="tags"), ()), scores=True)
    answer = ResponseAnswer(edge, turn, {"id": "resp_x"}, form)
    events = answer.news(0, turn.deltas).decode()
    both = ResponseAnswer(edge, turn, {"id": "resp_x"}, form)
    together = both.news(0, [joined(turn.deltas)]).decode()  # as where several guessed tokens were right
    assert [part.count('"token":') for part in together.split("\n\n") if "output_text.delta" in part] == [2]
    assert [part.count('"token":') for part in events.split("\n\n") if "output_text.delta" in part] == [1, 1]
    assert '"token":"yes"' in events
    assert '"token":"!"' in events
    assert "think" not in events


def test_the_options_of_chats_apply(client: OpenAI) -> None:
    def sampled(**options: Any) -> str:
        return str(ask(client, temperature=1, extra_body=options).output_text)

    assert sampled(seed=5) == sampled(seed=5) != sampled(seed=6)
    greedy = ask(client).output_text
    assert ask(client, extra_body={"stop": greedy[2]}).output_text == greedy[:2]


def test_template_variables_are_accepted_except_those_the_request_sets(witness: Server) -> None:
    body = {"input": "hi", "max_output_tokens": 1, "store": False}
    with witness.client() as http:
        assert post(http, **body, chat_template_kwargs={"enable_thinking": False}).status_code == 200
        refused = post(http, **body, chat_template_kwargs={"messages": []})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")


def post(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/responses", json=body)
