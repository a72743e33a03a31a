"""llama.cpp's completions, and its view of the turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.clients.caller import write_caller
from tests.serve.server import Server, serving

PROMPT = "I believe the meaning of life is"
GREEDY = {"prompt": PROMPT, "n_predict": 8, "temperature": 0}


def complete(server: Server, **asked: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/completion", json={**GREEDY, **asked}, timeout=60)


def test_a_stream_has_the_text_and_tokens_of_the_whole_answer(smollm2_server: Server) -> None:
    whole = complete(smollm2_server, return_tokens=True).json()
    events = complete(smollm2_server, stream=True, timings_per_token=True).text.strip().split("\n\n")
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == whole["tokens"]
    assert [chunk["stop"] for chunk in chunks] == [False] * len(chunks)
    assert all(chunk["timings"]["predicted_n"] == chunk["tokens_predicted"] for chunk in chunks)
    for end in (whole, last):
        assert (end["stop"], end["stop_type"], end["tokens_predicted"], end["prompt"]) == (True, "limit", 8, PROMPT)
        assert end["timings"]["prompt_n"] + end["timings"]["cache_n"] == end["tokens_evaluated"]
        assert (end["generation_settings"]["n_predict"], end["generation_settings"]["top_k"]) == (8, 40)


def test_a_prompt_that_is_only_computed_ends_at_its_limit(smollm2_server: Server) -> None:
    told = complete(smollm2_server, n_predict=0).json()
    assert (told["stop_type"], told["stopping_word"], told["content"]) == ("limit", "", "")


def test_a_word_or_the_models_own_end_ends_a_completion(smollm2_server: Server) -> None:
    text = complete(smollm2_server).json()["content"]
    word = text.split()[1]
    stopped = complete(smollm2_server, stop=[word]).json()
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert word not in stopped["content"]
    chat = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    assert complete(smollm2_server, prompt=chat, n_predict=-1).json()["stop_type"] == "eos"


def test_several_prompts_give_a_list(smollm2_server: Server) -> None:
    tokens = httpx.post(f"{smollm2_server.url}/tokenize", json={"content": PROMPT}, timeout=60).json()["tokens"]
    by_text, by_tokens = complete(smollm2_server, prompt=[PROMPT, tokens]).json()
    assert by_text["content"] == by_tokens["content"] == complete(smollm2_server, prompt=tokens).json()["content"]
    assert complete(smollm2_server, prompt=[PROMPT, PROMPT], stream=True).status_code == 400


def test_a_prompt_may_be_an_object_or_texts_among_tokens(smollm2_server: Server) -> None:
    usual = complete(smollm2_server).json()
    tokens = httpx.post(f"{smollm2_server.url}/tokenize", json={"content": PROMPT}, timeout=60).json()["tokens"]
    spelled = httpx.post(f"{smollm2_server.url}/detokenize", json={"tokens": tokens[2:]}, timeout=60).json()["content"]
    for prompt in ({"prompt_string": PROMPT}, [*tokens[:2], spelled], [*tokens[:2], spelled, *tokens[:0]]):
        assert complete(smollm2_server, prompt=prompt).json()["content"] == usual["content"]
    listed = complete(smollm2_server, prompt=[PROMPT, {"prompt_string": PROMPT}, [*tokens[:2], spelled]]).json()
    assert [each["content"] for each in listed] == [usual["content"]] * 3
    both = complete(smollm2_server, prompt=[tokens[0], "<|im_end|>", tokens[1]]).json()
    assert both["tokens_evaluated"] == 3
    for wrong in (
        {"prompt_string": "x", "multimodal_data": ["AAAA"]},
        [1, "x"] * 257,
        [1, None],
        [1, [2]],
        [],
        {"prompt_string": 1},
    ):
        assert complete(smollm2_server, prompt=wrong).status_code == 400


def test_the_biases_of_a_text_are_those_of_its_tokens(smollm2_server: Server) -> None:
    text = complete(smollm2_server).json()["content"]
    word = f" {text.split()[0]}"
    for biases in ([[word, False]], {word: -100}):
        assert not complete(smollm2_server, logit_bias=biases).json()["content"].startswith(word)


def test_ignore_eos_forbids_the_end(smollm2_server: Server) -> None:
    chat = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    told = complete(smollm2_server, prompt=chat, n_predict=64, ignore_eos=True, return_tokens=True).json()
    forbidden = {entry["token"] for entry in told["generation_settings"]["logit_bias"]}
    assert (told["tokens_predicted"], told["stop_type"]) == (64, "limit")
    assert forbidden
    assert not forbidden & set(told["tokens"])
    assert complete(smollm2_server).json()["generation_settings"]["logit_bias"] == []


def test_an_answer_that_the_context_ends_is_truncated(filler: Server) -> None:
    with filler.client() as http:
        asked: dict[str, Any] = {"prompt": "x", "ignore_eos": True, "temperature": 0}
        ended = http.post("/completion", json=asked).raise_for_status().json()
        assert (ended["truncated"], ended["tokens_evaluated"] + ended["tokens_predicted"]) == (True, 256)
        assert not http.post("/completions", json={**asked, "n_predict": 9}).raise_for_status().json()["truncated"]


def test_max_tokens_is_another_name_of_n_predict(smollm2_server: Server) -> None:
    for named in ("n_predict", "max_tokens"):
        told = complete(smollm2_server, **{"n_predict": None, named: 3}).json()
        assert (told["tokens_predicted"], told["stop_type"]) == (3, "limit")


def test_openais_requests_take_n_predict(smollm2_server: Server) -> None:
    with smollm2_server.client() as http:
        for path, asked in (
            ("/v1/completions", {"prompt": PROMPT}),
            ("/chat/completions", {"messages": [{"role": "user", "content": "Tell a story."}]}),
        ):
            told = http.post(path, json={**asked, "n_predict": 5}).raise_for_status().json()
            assert told["usage"]["completion_tokens"] == 5
        assert http.post("/responses", json={"input": "Hi", "max_output_tokens": 2}).json()["object"] == "response"


def test_probabilities_and_chosen_fields_are_shown(smollm2_server: Server) -> None:
    shown = complete(smollm2_server, n_probs=3).json()["completion_probabilities"]
    assert len(shown) == 8
    assert all(len(one["top_logprobs"]) == 3 and bytes(one["bytes"]).decode() == one["token"] for one in shown)
    few = complete(smollm2_server, response_fields=["content", "generation_settings/n_predict", "none"]).json()
    assert few.keys() == {"content", "generation_settings/n_predict"}


def test_biases_are_pairs_or_an_object(smollm2_server: Server) -> None:
    first = complete(smollm2_server, return_tokens=True).json()["tokens"][0]
    for biases in ([[first, False]], [[first, -100]], {str(first): -100}):
        assert complete(smollm2_server, logit_bias=biases, return_tokens=True).json()["tokens"][0] != first


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"mirostat": 2}, "mirostat"),
        ({"logit_bias": [["word"]]}, "logit_bias"),
        ({"logit_bias": {"9" * 10: 1}}, "logit_bias"),
        ({"prompt": "word " * 9999}, "prompt"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"n_predict": -2}, "n_predict"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_refusals_name_the_field(smollm2_server: Server, asked: dict[str, Any], name: str) -> None:
    refused = complete(smollm2_server, **asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model that has tokens for filling in, and ends every answer at once."""
    model = write_caller(tmp_path_factory.mktemp("filler"), "unused", {})
    file = model / "tokenizer.json"
    text = file.read_text()
    for number, name in enumerate(("fim_prefix", "fim_suffix", "fim_middle", "repo_name", "file_sep")):
        text = text.replace(f'"\u0120unused{number}"', f'"<|{name}|>"')
    file.write_text(text)
    with serving("--model", str(model), "--context-length", "256", "--served-model-name", "filler") as server:
        yield server
        server.audit()


def test_the_middle_of_a_text_is_filled_in(filler: Server) -> None:
    with filler.client() as http:
        asked: dict[str, Any] = {"input_prefix": "def f(", "prompt": "x", "input_suffix": "): pass"}
        alone = http.post("/infill", json=asked).raise_for_status().json()
        assert alone["prompt"] == "<|fim_prefix|>def f(x<|fim_suffix|>): pass<|fim_middle|>"
        assert (alone["stop_type"], alone["content"]) == ("eos", "")
        more = http.post("/infill", json={**asked, "input_extra": [{"filename": "a.py", "text": "A = 1\n"}]}).json()
        files = "<|repo_name|>repository\n<|file_sep|>a.py\nA = 1\n<|file_sep|>this_file\n"
        assert more["prompt"] == files + alone["prompt"]
        for wrong in ({}, {"filename": "a"}, {"filename": 1, "text": "a"}):
            assert http.post("/infill", json={**asked, "input_extra": [wrong]}).status_code == 400
        by_ollama = {"model": "filler", "prompt": "def f(x", "suffix": "): pass", "stream": False}
        answer = http.post("/api/generate", json=by_ollama).raise_for_status().json()
        assert answer["prompt_eval_count"] == alone["tokens_evaluated"]
        assert "insert" in http.post("/api/show", json={"model": "filler"}).json()["capabilities"]


def test_a_model_without_tokens_for_filling_in_says_so(smollm2_server: Server) -> None:
    with smollm2_server.client() as http:
        refused = http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")
        told = http.post("/api/generate", json={"model": "smollm2", "prompt": "a", "suffix": "b"})
        assert (told.status_code, told.json()["error"]) == (400, refused.json()["error"]["message"])


def test_slots_show_a_tenant_its_own_turns_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[[keys]]\ntenant = 'a'\nkey = 'a-key'\n[[keys]]\ntenant = 'b'\nkey = 'b-key'\n")
    more = ("--keys", str(keys), "--admin-api-key", "admin-key", "--max-running-requests", "2")
    with serving("--model", "witness:0.005", "--context-length", "4096", *more) as server:
        with server.client(headers={"authorization": "Bearer a-key"}) as http:
            http.post("/v1/sessions", json={"id": "mine"})
            turn = {"input": [1, 2], "max_new_tokens": 4000, "stream": True}
            with http.stream("POST", "/v1/sessions/mine/turns", json=turn) as stream:
                lines = stream.iter_lines()  # the stream is closed with it
                assert next(lines) == "event: started"
                seen = {name: slots_of(server, name) for name in ("a", "b", "admin")}
        assert seen["a"][0] == seen["admin"][0]
        assert (seen["a"][0]["session_id"], seen["a"][0]["n_prompt_tokens"]) == ("mine", 2)
        assert [slot["is_processing"] for slot in seen["b"]] == [True, False]
        assert seen["b"][0].keys() == seen["b"][1].keys()


def slots_of(server: Server, name: str) -> list[dict[str, Any]]:
    with server.client(headers={"authorization": f"Bearer {name}-key"}) as http:
        shown: list[dict[str, Any]] = http.get("/slots").raise_for_status().json()
    for slot in shown:
        slot.pop("next_token", None)  # it goes on
    return shown
