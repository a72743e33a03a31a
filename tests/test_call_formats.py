"""Calls in every format, from the template to the caller: a grammar forces the witness to call a function, and the
result is the next turn. The templates are the shortest of their kind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import tenuto
from tenuto.base.config import WorkerSettings
from tenuto.base.groups import GroupSpec, Kind
from tenuto.base.tools.definitions import CHANNELS, MARKS
from tenuto.exec.witness import WitnessExecutor
from tenuto.runtime.models import Model
from tenuto.text.chat import ChatTemplate
from tenuto.text.tokenizer import Tokenizer
from tests.present import present

SHAPE = """\
{%%- if tools %%}{{ '[TOOLS]' ~ tools | tojson }}{%% endif %%}
{%%- for m in messages %%}
    {%%- if m.role == 'assistant' %%}
        {%%- for call in m.tool_calls or [] %%}%s{%% endfor %%}{{ m.content ~ '<end>' }}
    {%%- elif m.role == 'tool' %%}{{ '[RESULT]' ~ m.content }}
    {%%- else %%}{{ '[' ~ m.role ~ ']' ~ m.content }}{%% endif %%}
{%%- endfor %%}
{%%- if add_generation_prompt %%}{{ '[assistant]' }}{%% endif %%}"""
CALLS = {
    "functions": "{{ '<tool_call>\\n<function=' ~ call.function.name ~ '>' }}{{ '<parameter=' }}",
    "list": "{{ '<TOOLCALL>[' ~ call.function | tojson ~ ']</TOOLCALL>' }}",
    "named": "{{ '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ call.function.arguments | tojson }}",
    "json": "{{ '<|tool_call|>[' ~ call.function | tojson ~ ']' }}",
    "channels": "{{ '<|start|>assistant<|channel|>commentary to=functions.x<|constrain|>json<|message|><|end|>' }}",
}
WEATHER: Any = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def tokenizer_of_bytes() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", *MARKS, *CHANNELS])
    return Tokenizer(backend, eos_ids=(present(backend.token_to_id("<end>")),))


@pytest.mark.parametrize("shape", CALLS)
def test_a_call_in_any_format_is_read_streamed_and_answered(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of_bytes()
    chat = ChatTemplate(SHAPE % CALLS[shape], tokenizer)
    assert chat.habits.tools == shape

    def load(settings: WorkerSettings) -> Model:
        executor = WitnessExecutor(settings.page_size, [GroupSpec(Kind.FULL, 64)], tokenizer.vocab_size)
        return Model(executor, tokenizer.vocab_size, tokenizer.eos_ids, 4000, tokenizer, chat)

    monkeypatch.setattr("tenuto.api.transport.load_model", load)
    with tenuto.Engine("any", page_size=4, context_length=4000) as engine:
        session = engine.session()
        forced: Any = {"tools": [WEATHER], "tool_choice": {"name": "weather"}, "max_new_tokens": 1500}
        turn = session.turn([{"role": "user", "content": "Rome?"}], **forced)
        assert "".join(turn) == ""
        (call,) = turn.tool_calls
        given = json.loads(call.arguments)
        assert (call.name, given["city"] in ("Rome", "Oslo"), 1 <= given["days"] <= 9) == ("weather", True, True)
        result = {"role": "tool", "content": "4 degrees", "tool_call_id": call.id, "name": "weather"}
        asked = len(session.history)
        session.turn([result], max_new_tokens=1).result()
        assert "[RESULT]4 degrees[assistant]" in tokenizer.decode(session.history[asked:])
        told = session.turn([{"role": "user", "content": "x"}], tools=[WEATHER], max_new_tokens=60)
        assert "".join(told) == (told.message["content"] or "")
