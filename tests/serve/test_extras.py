"""Fields of vLLM, SGLang, OpenAI and Anthropic beyond those we offer: values that request nothing are accepted, and
unsupported ones are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.server import Server

CHAT = {"model": "witness", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
COMPLETION = {"model": "witness", "prompt": "x", "max_tokens": 1}
RESPONSE = {"model": "witness", "input": "x", "max_output_tokens": 1, "store": False}
MESSAGE = {"model": "witness", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
GENERATE = {"text": "x", "sampling_params": {"max_new_tokens": 1}}

SAMPLING: dict[str, list[Any]] = {
    "temperature": [None, 1.0, 0],
    "top_p": [None, 1.0],
    "top_k": [None, -1, 0, 5],
    "min_p": [None, 0.0, 0.1],
    "repetition_penalty": [None, 1.0],
    "presence_penalty": [None, 0.0],
    "frequency_penalty": [None, 0.0],
    "logit_bias": [None, {}, {"5": 1.0}],
    "seed": [None, 7],
    "stop": [None, [], "x", ["x", "y"]],
    "ignore_eos": [None, False, True],
    "skip_special_tokens": [None, True],
}
VLLM: dict[str, list[Any]] = {
    "use_beam_search": [False],
    "length_penalty": [1.0],
    "early_stopping": [False],
    "stop_token_ids": [None, [], [5]],
    "include_stop_str_in_output": [False, True],
    "min_tokens": [0],
    "spaces_between_special_tokens": [True, False],
    "truncate_prompt_tokens": [None],
    "truncation_side": [None],
    "prompt_logprobs": [None],
    "allowed_token_ids": [None, []],
    "bad_words": [None, [], ["x y"]],
    "structured_outputs": [None],
    "guided_json": [None],
    "guided_regex": [None],
    "guided_choice": [None],
    "guided_grammar": [None],
    "guided_decoding_backend": [None, "auto"],
    "guided_whitespace_pattern": [None],
    "structural_tag": [None],
    "priority": [0, 1],
    "request_id": ["a"],
    "logits_processors": [None],
    "return_tokens_as_token_ids": [None, False],
    "return_token_ids": [None, False],
    "cache_salt": [None, ""],
    "kv_transfer_params": [None],
    "vllm_xargs": [None],
    "repetition_detection": [None],
}
SGLANG: dict[str, list[Any]] = {
    "min_tokens": [0],
    "regex": [None],
    "ebnf": [None],
    "stop_regex": [None],
    "no_stop_trim": [False],
    "lora_path": [None],
    "session_params": [None],
    "custom_logit_processor": [None],
    "custom_params": [None],
    "return_hidden_states": [False],
    "return_routed_experts": [False],
    "return_cached_tokens_details": [False],
    "return_meta_info": [False],
    "rid": [None, "a"],
    "extra_key": [None, ""],
    "bootstrap_host": [None],
    "bootstrap_port": [None],
    "bootstrap_room": [None],
    "data_parallel_rank": [None],
    "routed_dp_rank": [None],
    "disagg_prefill_dp_rank": [None],
    "custom_labels": [None, {"a": "b"}],
    "priority": [None],
}
OPENAI: dict[str, list[Any]] = {
    "metadata": [None, {}, {"a": "b"}],
    "prompt_cache_key": ["a"],
    "prompt_cache_retention": [None, "24h"],
    "safety_identifier": ["a"],
    "service_tier": [None, "auto", "default"],
    "user": [None, "a"],
}
ACCEPTED: dict[tuple[str, str], tuple[dict[str, Any], dict[str, list[Any]]]] = {
    ("/v1/chat/completions", "chat"): (
        CHAT,
        {
            **SAMPLING,
            **VLLM,
            **SGLANG,
            **OPENAI,
            "audio": [None],
            "add_generation_prompt": [True],
            "add_special_tokens": [False],
            "best_of": [None, 1],
            "chat_template": [None],
            "chat_template_kwargs": [None, {}],
            "continue_final_message": [False],
            "documents": [None],
            "echo": [False],
            "function_call": [None, "none", "auto"],
            "functions": [None, []],
            "include_reasoning": [None, True],
            "logprobs": [None, False, True],
            "media_io_kwargs": [None],
            "mm_processor_kwargs": [None],
            "modalities": [None, ["text"]],
            "n": [None, 1],
            "parallel_tool_calls": [None, True, False],
            "prediction": [None],
            "reasoning": [None],
            "reasoning_effort": [None, "none"],
            "response_format": [None, {"type": "text"}],
            "separate_reasoning": [True],
            "store": [None, False],
            "stream_options": [None],
            "stream_reasoning": [True],
            "thinking_token_budget": [None],
            "tool_choice": [None, "none", "auto"],
            "tools": [None, []],
            "top_logprobs": [None, 0],
            "verbosity": [None],
            "web_search_options": [None],
        },
    ),
    ("/v1/completions", "completion"): (
        COMPLETION,
        {
            **SAMPLING,
            **VLLM,
            **SGLANG,
            "best_of": [None, 1],
            "add_special_tokens": [True],
            "echo": [None, False, True],
            "logprobs": [None, 0, 2],
            "n": [None, 1],
            "prompt_embeds": [None],
            "response_format": [None],
            "suffix": [None],
            "user": [None, "a"],
        },
    ),
    ("/v1/responses", "response"): (
        RESPONSE,
        {
            **OPENAI,
            "background": [None, False],
            "cache_salt": [None],
            "context_management": [None],
            "conversation": [None],
            "enable_response_messages": [False],
            "frequency_penalty": [None, 0.0],
            "ignore_eos": [False],
            "include": [None, [], ["reasoning.encrypted_content"]],
            "include_stop_str_in_output": [False],
            "kv_transfer_params": [None],
            "logit_bias": [None, {"5": 1}],
            "max_tool_calls": [None],
            "min_p": [0.0, 0.2],
            "mm_processor_kwargs": [None],
            "presence_penalty": [None, 0.0],
            "previous_input_messages": [None],
            "priority": [0],
            "prompt": [None],
            "reasoning": [None, {}, {"effort": None}],
            "repetition_penalty": [1.0, 1.5],
            "request_id": ["a"],
            "seed": [None, 5],
            "skip_special_tokens": [True],
            "stop": [None, [], ["x"]],
            "stream_options": [None],
            "structured_outputs": [None],
            "text": [None, {"format": {"type": "text"}}, {"verbosity": "low"}],
            "top_k": [-1, 0, 5],
            "top_logprobs": [None, 0, 3],
            "truncation": [None, "disabled", "auto"],
            "vllm_xargs": [None],
        },
    ),
    ("/v1/messages", "message"): (
        MESSAGE,
        {
            "cache_control": [None, {"type": "ephemeral"}],
            "chat_template_kwargs": [None],
            "container": [None],
            "context_management": [None],
            "inference_geo": [None],
            "kv_transfer_params": [None],
            "mcp_servers": [None, []],
            "metadata": [None, {"user_id": "a"}],
            "output_config": [None, {"effort": "low"}],
            "service_tier": [None, "auto"],
            "stop_sequences": [None, [], ["x"]],
            "stream": [None, False],
            "temperature": [None, 0.5],
            "thinking": [None, {"type": "disabled"}],
            "tool_choice": [None, {"type": "auto"}, {"type": "none"}],
            "tools": [None, []],
            "top_k": [None, 5],
            "top_p": [None, 0.9],
        },
    ),
    ("/generate", "generate"): (
        GENERATE,
        {
            "audio_data": [None],
            "background": [False],
            "bootstrap_host": [None],
            "conversation_id": ["a"],
            "custom_logit_processor": [None],
            "data_parallel_rank": [None],
            "extra_key": [None, ""],
            "image_data": [None],
            "input_embeds": [None],
            "log_metrics": [True, False],
            "logprob_start_len": [None, -1],
            "lora_path": [None],
            "modalities": [None],
            "no_logs": [False],
            "priority": [None, 0],
            "return_bytes": [False],
            "return_entropy": [False],
            "return_hidden_states": [False],
            "return_logprob": [False, True],
            "return_routed_experts": [False],
            "token_ids_logprob": [None],
            "top_logprobs_num": [0],
            "video_data": [None],
        },
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        CHAT,
        {
            "audio": {"voice": "a", "format": "wav"},
            "cache_salt": "a",
            "chat_template": "{{ x }}",
            "custom_params": {"a": 1},
            "data_parallel_rank": 1,
            "extra_key": "a",
            "functions": [{"name": "f"}],
            "length_penalty": 2.0,
            "logits_processors": ["a"],
            "lora_path": "a",
            "modalities": ["text", "audio"],
            "no_such_field": 1,
            "repetition_detection": {"a": 1},
            "return_routed_experts": True,
            "session_params": {"id": "a"},
            "structural_tag": "a",
            "thinking_token_budget": 7,
            "use_beam_search": True,
        },
    ),
    "/v1/completions": (
        COMPLETION,
        {
            "best_of": 2,
            "lora_path": "a",
            "prompt_embeds": "a",
            "return_hidden_states": True,
            "suffix": "a",
            "use_beam_search": True,
        },
    ),
    "/v1/responses": (
        RESPONSE,
        {
            "cache_salt": "a",
            "prompt": {"id": "a"},
            "skip_special_tokens": False,
            "enable_response_messages": True,
        },
    ),
    "/v1/messages": (
        MESSAGE,
        {
            "chat_template_kwargs": {"a": 1},
            "kv_transfer_params": {"a": 1},
        },
    ),
    "/generate": (
        GENERATE,
        {
            "extra_key": "a",
            "image_data": "a",
            "input_embeds": [[0.5]],
            "return_hidden_states": True,
        },
    ),
}


@pytest.mark.parametrize("face", ACCEPTED, ids=lambda face: face[1])
def test_fields_that_request_nothing_or_are_supported_are_accepted(witness: Server, face: tuple[str, str]) -> None:
    body, fields = ACCEPTED[face]
    refused = []
    with witness.client() as http:
        for name, values in fields.items():
            for value in values:
                answer = http.post(face[0], json={**body, name: value})
                if answer.status_code != 200:
                    refused.append(f"{name} {value!r}: {answer.text}")
    assert not refused, "\n".join(refused)


def test_harmless_sampling_parameters_of_sglang_are_accepted(witness: Server) -> None:
    fields: dict[str, list[Any]] = {
        "custom_params": [None],
        "json_schema": [None],
        "no_stop_trim": [False, True],
        "sampling_seed": [None, 5],
        "skip_special_tokens": [True, False],
        "spaces_between_special_tokens": [True],
        "stop_regex": [None],
        "stream_interval": [None, 5],
        "structural_tag": [None],
        "top_k": [-1],
    }
    with witness.client() as http:
        for name, values in fields.items():
            for value in values:
                body = {**GENERATE, "sampling_params": {"max_new_tokens": 1, name: value}}
                answer = http.post("/generate", json=body)
                assert answer.status_code == 200, f"{name} {value!r}: {answer.text}"


@pytest.mark.parametrize("path", REFUSED)
def test_unsupported_fields_are_refused_by_name_with_the_reason(witness: Server, path: str) -> None:
    body, fields = REFUSED[path]
    wrong = []
    with witness.client() as http:
        for name, value in fields.items():
            answer = http.post(path, json={**body, name: value})
            said = answer.json().get("error", {})
            why = "invalid_request" if name == "no_such_field" else "unsupported"
            if path == "/v1/messages":  # whose errors have neither
                named = said.get("message", "").startswith(f"{name} is ")
            else:
                named = (said.get("param"), said.get("code")) == (name, why)
            if answer.status_code != 400 or not named:
                wrong.append(f"{name}: {answer.status_code} {answer.text[:300]}")
    assert not wrong, "\n".join(wrong)
