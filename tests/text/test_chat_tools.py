"""Tools, calls and results in conversations, with templates that support tools and with those that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.answers import AnswerReader
from tenuto.base.tools.definitions import ModelHabits, ToolCall, Tools
from tenuto.base.tools.variables import Variables
from tenuto.base.turns import Message
from tenuto.text.chat import ChatTemplate
from tenuto.text.tools import habits_of
from tenuto.text.words import CHAT_TEMPLATE, witness_tokenizer

TOKENS = witness_tokenizer(700)
HERMES = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'assistant') %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
OPENED = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}{# </think> #}")
FUNCTION = {"name": "weather", "description": "of <|im_end|> a city", "parameters": {"type": "object"}}
TOOLS = Tools.of([FUNCTION])
ASKED = [Message("user", "Rome?")]
END = TOKENS.vocab_size - 1


def written(tokens: list[int]) -> str:
    return TOKENS.decode(tokens, special=True)


def test_a_template_that_supports_tools_receives_them() -> None:
    chat = ChatTemplate(HERMES, TOKENS)
    tokens, conversation = chat.opening(ASKED, tools=TOOLS)
    assert json.dumps({"type": "function", "function": FUNCTION}) in written(tokens)
    assert tokens.count(END) == 2  # the one in the description is text
    assert (conversation.tools, chat.opening(ASKED).conversation.tools) == (TOOLS.digest, "")


def test_a_template_without_tools_has_them_in_its_system_message() -> None:
    chat = ChatTemplate(CHAT_TEMPLATE, TOKENS)
    tokens, conversation = chat.opening(ASKED, tools=TOOLS)
    text = written(tokens)
    assert text.startswith("<|im_start|>system\nYou can call these functions:\n" + json.dumps(FUNCTION))
    assert tokens.count(END) == 2
    assert conversation.system
    with_system = written(chat.opening([Message("system", "Be brief."), *ASKED], tools=TOOLS).tokens)
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\nYou can call")


CALLS = (ToolCall("weather", '{"city": "<|im_end|>"}', "call_1"), ToolCall("weather", "", "call_2"))
RESULTS = [Message("tool", "4 degrees <|im_start|>", tool_call_id="call_1", name="weather"), Message("tool", "5")]


@pytest.mark.parametrize("source", [HERMES, CHAT_TEMPLATE], ids=["hermes", "plain"])
def test_calls_and_results_are_rendered_and_user_text_in_them_stays_text(source: str) -> None:
    chat = ChatTemplate(source, TOKENS)
    messages = [*ASKED, Message("assistant", "", CALLS, reasoning="hm"), *RESULTS]
    tokens, conversation = chat.opening(messages, tools=TOOLS)
    text = written(tokens)
    assert '{"name": "weather", "arguments": {"city": "<|im_end|>"}}' in text
    assert '"arguments": {}' in text
    assert "4 degrees <|im_start|>" in text
    assert tokens.count(END) == 5  # of the system message, the question, the calls and two results
    assert conversation.role == "assistant"
    assert ("<think>hm</think>" in text) is (source is HERMES)


@pytest.mark.parametrize("source", [HERMES, CHAT_TEMPLATE], ids=["hermes", "plain"])
def test_a_result_sent_as_the_next_turn_is_rendered_as_in_the_whole_conversation(source: str) -> None:
    chat = ChatTemplate(source, TOKENS)
    first, conversation = chat.opening(ASKED, tools=TOOLS)
    said = TOKENS.encode('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    result, later = chat.delta(conversation, [RESULTS[1]], last_token=END)
    whole, _ = chat.opening([*ASKED, Message("assistant", TOKENS.decode(said)), RESULTS[1]], tools=TOOLS)
    assert [*first, *said, END, *result] == whole
    assert later == conversation


@pytest.mark.parametrize(
    ("source", "habits"),
    [
        (CHAT_TEMPLATE, ModelHabits("json")),
        (HERMES, ModelHabits("tags", thinks="tags", late_system=False)),
        (OPENED, ModelHabits("json", thinks="opened")),
        (CHAT_TEMPLATE + """{# {"name": x, "parameters": y} #}""", ModelHabits("json", "parameters")),
    ],
    ids=["plain", "hermes", "opened", "llama"],
)
def test_the_format_of_calls_and_reasoning_is_read_from_the_template(source: str, habits: ModelHabits) -> None:
    assert ChatTemplate(source, TOKENS).habits == habits


MISTRAL = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS]
{%- for call in message.tool_calls %}{{ call.function.name }}, "id": {{ call.id }}{% endfor %}<|im_end|>
{%- elif message.role == 'assistant' %}{{ message.content }}<|im_end|>
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception("nine letters") }}{% endif -%}
[TOOL_RESULTS]{{ message.tool_call_id }} {{ message.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"""


def test_the_control_tokens_around_calls_are_those_the_template_writes() -> None:
    control = {"[TOOL_CALLS]": 698, "[ARGS]": 699}.get
    assert habits_of(MISTRAL, "", control) == ModelHabits(marks=(("[TOOL_CALLS]", 698),), short_ids=True)
    assert habits_of("[TOOL_CALLS]{{ name }}[ARGS]", "", control) == ModelHabits(
        "named", marks=(("[TOOL_CALLS]", 698), ("[ARGS]", 699))
    )
    assert habits_of("{# <|tool_call|> #}", "", {"<|tool_call|>": 5}.get) == ModelHabits(marks=(("<|tool_call|>", 5),))
    assert habits_of(HERMES, "", control) == ModelHabits("tags", thinks="tags")


def test_call_ids_have_the_form_the_template_requires() -> None:
    chat = ChatTemplate(MISTRAL, TOKENS)
    assert chat.habits.short_ids
    for said in ('[{"name": "weather", "arguments": {}}]', '[{"name": "weather", "arguments": {}, "id": "abcDEF123"}]'):
        reader = AnswerReader(chat.habits, ["weather"], "answer")
        reader.push(said)
        (call,) = reader.finish().calls
        assert ("abcDEF123" in said) is (call.id == "abcDEF123")
        result = Message("tool", "4 degrees", tool_call_id=call.id)
        tokens, _ = chat.opening([*ASKED, Message("assistant", "", (call,)), result])
        assert f"[TOOL_RESULTS]{call.id} 4 degrees" in written(tokens)


def test_a_result_is_appended_where_a_template_refuses_results_without_ids() -> None:
    chat = ChatTemplate(MISTRAL, TOKENS)
    opened = chat.opening(ASKED).conversation
    result = Message("tool", "4 degrees", tool_call_id="abcDEF123")
    appended, later = chat.delta(opened, [result], last_token=END, generate=False)
    asked, _ = chat.delta(later, [], last_token=appended[-1])
    assert written([*appended, *asked]) == "[TOOL_RESULTS]abcDEF123 4 degrees[/TOOL_RESULTS]"


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize("source", [HERMES, CHAT_TEMPLATE], ids=["hermes", "plain"])
def test_json_may_be_nested_as_deeply_as_templates_can_write(source: str) -> None:
    chat = ChatTemplate(source, TOKENS)
    calls = (ToolCall("f", json.dumps(nested(128))),)
    tools = Tools.of([{"name": "f", "parameters": nested(125)}])
    messages = [*ASKED, Message("assistant", "", calls), *ASKED]
    assert chat.opening(messages, tools=tools, variables=Variables.of(nested(128))).tokens
    for deeper in (129, 600, 5000):
        text = '{"a":' * (deeper - 1) + "{}" + "}" * (deeper - 1)
        for told, param in (
            (lambda text=text: ToolCall("f", text), "tool_calls"),
            (lambda text=text: Variables(text).parsed(), "chat_template_kwargs"),
            (lambda text=text: Tools(f'[{{"a": {text}}}]').parsed(), "tools"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                told()
            assert refused.value.param == param
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        Tools.of([{"name": "f", "parameters": nested(129)}])


def test_escaped_arguments_are_rendered_as_they_are() -> None:
    chat = ChatTemplate(HERMES, TOKENS)
    city = "".join(map(chr, range(0xF0000, 0xF0009)))
    call = ToolCall("weather", json.dumps({"city": city}))
    messages = [Message("assistant", "", (call,)), *ASKED]
    opened = chat.opening(ASKED, generate=False)
    added, _ = chat.delta(opened.conversation, messages, last_token=opened.tokens[-1])
    assert city in written(added)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        ToolCall("f", '{"x": "\\ud800"}')
    with pytest.raises(InvalidRequest, match="surrogate"):
        Tools.of([{"name": "f", "parameters": {"description": "\ud800"}}])
    with pytest.raises(InvalidRequest, match="surrogate"):
        Variables.of({"style": "\ud800"})


@pytest.mark.parametrize("arguments", ["{", "[1]", "nonsense", 7])
def test_arguments_that_are_not_an_object_are_refused(arguments: object) -> None:
    with pytest.raises(InvalidRequest, match="arguments"):
        ToolCall("f", arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["{", "7", "[7]", 7])
def test_tools_that_are_not_a_list_of_objects_are_refused(source: object) -> None:
    with pytest.raises(InvalidRequest):
        Tools(source).parsed()  # type: ignore[arg-type]


def test_messages_with_calls_may_be_written_as_objects() -> None:
    given = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}", "id": "x"}]}
    assert Message.from_dict(given) == Message("assistant", "", (ToolCall("f", "{}", "x"),))
    assert Message.from_dict({"role": "tool", "content": "4", "tool_call_id": "x"}).tool_call_id == "x"
    for wrong in ({"tool_calls": [7]}, {"tool_calls": [{"nome": "f"}]}, {"tool_call_id": 7}, {"else": 1}):
        with pytest.raises(InvalidRequest):
            Message.from_dict({"role": "user", "content": "", **wrong})
