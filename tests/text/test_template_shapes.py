"""Templates of the shapes that models come with. If a template writes an earlier turn as it did when that turn was the
last, the turns of a session add up to the whole conversation. Otherwise the session keeps its history, and every turn
adds the text that the template writes after it."""

from __future__ import annotations

import functools
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.errors import InvalidRequest, ModelError
from tenuto.base.tools.answers import AnswerReader
from tenuto.base.tools.definitions import NO_TOOLS, ModelHabits, ToolCall, Tools
from tenuto.base.tools.variables import Variables
from tenuto.base.turns import Message
from tenuto.base.wire.document import Conversation
from tenuto.text.chat import ChatTemplate
from tenuto.text.tokenizer import Tokenizer
from tests.present import present

DATED = """\
{{- bos_token -}}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' ~ strftime_now('%d %b %Y') ~ '\\n\\n' -}}
{{- system ~ '<|eot_id|>' -}}
{%- for m in rest -%}
    {{- '<|start_header_id|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<|end_header_id|>\\n\\n' -}}
    {{- (m.content | trim) ~ '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
FORGETFUL = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
    {{- '<|im_start|>' ~ m.role ~ '\\n' -}}
    {%- set thought = m.content.split('</think>')[0] if '</think>' in m.content else '' -%}
    {%- set said = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content -%}
    {%- if m.role == 'assistant' and thought and loop.index0 > ns.last -%}{{- thought ~ '</think>' -}}{%- endif -%}
    {{- said ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
OPENED = """\
{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'system' -%}{{- m.content -}}
    {%- elif m.role == 'assistant' -%}{{- '[/INST]' ~ m.content.split('</think>')[-1] ~ eos_token -}}
    {%- else -%}{{- '[INST]' ~ m.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '[/INST]<think>\\n' }}{% endif -%}
"""
MOVING = """\
{{- bos_token -}}
{%- set system = messages[0].content if messages[0].role == 'system' else none -%}
{%- for m in (messages[1:] if system is not none else messages) -%}
    {%- if (m.role == 'user') != (loop.index0 is even) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
    {%- if m.role == 'user' -%}
        {%- if loop.last and tools -%}{{- '[TOOLS]' ~ tools | tojson ~ '[/TOOLS]' -}}{%- endif -%}
        {{- '[INST]' -}}
        {%- if loop.last and system is not none -%}{{- system ~ '\\n\\n' -}}{%- endif -%}
        {{- m.content ~ '[/INST]' -}}
    {%- else -%}{{- m.content ~ eos_token -}}{%- endif -%}
{%- endfor -%}
"""
FOLDING = """\
{{- bos_token -}}
{%- set first = messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- for m in (messages[1:] if first else messages) -%}
    {%- if (m.role == 'user') != (loop.index0 is even) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
    {{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' -}}
    {{- (first if loop.first else '') ~ (m.content | trim) ~ '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""
CHANNELS = """\
{{- '<|im_start|>system<|im_end|>' ~ strftime_now('%Y-%m-%d') ~ '<|eot_id|>' -}}
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
        {%- if loop.last and not add_generation_prompt -%}
            {{- '<|im_start|>assistant<|im_end|>' ~ m.content ~ '<|end|>' -}}
        {%- else -%}{{- '<|im_start|>assistant<|im_end|>' ~ m.content ~ '<|eot_id|>' -}}{%- endif -%}
    {%- else -%}{{- '<|im_start|>' ~ m.role ~ '<|im_end|>' ~ m.content ~ '<|eot_id|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_end|>' }}{% endif -%}
"""
STABLE = {"dated": DATED, "forgetful": FORGETFUL, "folding": FOLDING}
NOON = datetime(2025, 7, 1, 12, tzinfo=UTC)
SYSTEM = Message("system", "Be brief.")

load = functools.cache(lambda source, tokenizer: ChatTemplate(source, tokenizer, lambda: NOON))
questions = st.text(alphabet=st.sampled_from("abc the,😀日é\n<|im_end|>[INST]"), max_size=12).map(str.strip)
answers = st.text(alphabet=st.sampled_from("abc the,😀日é"), max_size=12).map(str.strip)
talks = st.lists(st.tuples(questions, answers), min_size=1, max_size=4)


def turn_by_turn(
    chat: ChatTemplate,
    tokenizer: Tokenizer,
    talk: list[tuple[str, str]],
    system: bool = False,
    tools: Tools = NO_TOOLS,
) -> list[int]:
    """Returns the history after `talk` and a last question."""
    history: list[int] = []
    conversation: Conversation | None = None
    for question, answer in [*talk, ("So?", "")]:
        messages = [Message("user", question)]
        if conversation is None:
            added, conversation = chat.opening([SYSTEM] * system + messages, tools=tools)
        else:
            added, conversation = chat.delta(conversation, messages, last_token=history[-1])
        assert chat.end_of_turn is not None
        history += [*added, *tokenizer.encode(answer), chat.end_of_turn]
    return history[:-1]


def at_once(chat: ChatTemplate, talk: list[tuple[str, str]], system: bool = False) -> list[int]:
    messages = [SYSTEM] * system
    for question, answer in talk:
        messages += [Message("user", question), Message("assistant", answer)]
    return chat.opening([*messages, Message("user", "So?")]).tokens


@settings(max_examples=50)
@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("shape", STABLE)
@given(talk=talks)
def test_a_stable_template_writes_the_same_turn_by_turn_as_at_once(
    small: Tokenizer, shape: str, system: bool, talk: list[tuple[str, str]]
) -> None:
    chat = load(STABLE[shape], small)
    assert turn_by_turn(chat, small, talk, system) == at_once(chat, talk, system)


@settings(max_examples=50)
@given(talk=talks)
def test_reasoning_that_a_template_removes_later_is_kept_and_the_rest_is_unchanged(
    small: Tokenizer, talk: list[tuple[str, str]]
) -> None:
    for source, opened in ((FORGETFUL, "<think>zq"), (OPENED, "zq")):
        chat = load(source, small)
        thoughts = [(question, f"{opened}</think>{answer}") for question, answer in talk]
        kept = small.decode(turn_by_turn(chat, small, thoughts), special=True)
        assert kept.count("zq</think>") == len(talk)
        written = small.decode(at_once(chat, thoughts), special=True)
        prompt = "[/INST]<think>\n" if source == OPENED else ""
        assert kept.replace(f"{prompt}{opened}</think>", "[/INST]" if prompt else "") == written
        assert "zq" not in written
        assert chat.rewrites == ("removes the reasoning of earlier answers",)


@settings(max_examples=50)
@given(talk=talks)
def test_a_system_message_and_tools_stay_in_place_though_the_template_moves_them(
    small: Tokenizer, talk: list[tuple[str, str]]
) -> None:
    chat = load(MOVING, small)
    assert chat.rewrites == ("moves the system message to the last turn",)
    tools = Tools.of([{"name": "f"}])
    history = turn_by_turn(chat, small, talk, system=True, tools=tools)
    alone = chat.opening([SYSTEM, Message("user", talk[0][0])], tools=tools).tokens
    assert history[: len(alone)] == alone
    assert small.decode(alone).count("Be brief.") == 1
    without = turn_by_turn(chat, small, talk)
    assert history[len(alone) :] == without[len(chat.opening([Message("user", talk[0][0])]).tokens) :]
    assert without == at_once(chat, talk)


def test_a_lone_system_message_is_refused_where_the_template_moves_it(small: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="moves or drops"):
        load(MOVING, small).opening([SYSTEM], generate=False)


@settings(max_examples=30)
@given(talk=talks)
def test_every_answer_of_a_session_has_the_end_token_that_was_sampled(
    small: Tokenizer, talk: list[tuple[str, str]]
) -> None:
    """In the whole conversation, the template writes another token after earlier answers."""
    chat = load(CHANNELS, small)
    last, earlier = small.encode("<|end|><|eot_id|>", special=True)
    assert chat.end_of_turn == last
    assert chat.rewrites == ("closes the last answer with another token than earlier ones",)
    history = turn_by_turn(chat, small, talk)
    assert [earlier if token == last else token for token in history] == at_once(chat, talk)
    assert history.count(last) == len(talk)


@pytest.mark.parametrize("source", [DATED, CHANNELS])
def test_a_session_keeps_the_date_on_which_it_began(small: Tokenizer, source: str) -> None:
    now = [NOON]
    chat = ChatTemplate(source, small, lambda: now[0])
    tokens, conversation = chat.opening([Message("user", "Hi")])
    now[0] += timedelta(days=1)
    assert chat.end_of_turn is not None
    added, _ = chat.delta(conversation, [Message("user", "And?")], last_token=chat.end_of_turn)
    assert "2025" in small.decode(tokens)
    assert "2025" not in small.decode(added)
    assert added == load(source, small).delta(conversation, [Message("user", "And?")], last_token=chat.end_of_turn)[0]


COLLECTING = """\
{%- set ns = namespace(system='') -%}
{%- for m in messages -%}{%- if m.role == 'system' -%}{%- set ns.system = m.content -%}{%- endif -%}{%- endfor -%}
{{- bos_token ~ ns.system -}}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{{- '[INST]' ~ m.content ~ '[/INST]' -}}
    {%- elif m.role == 'assistant' -%}{{- m.content ~ eos_token -}}{%- endif -%}
{%- endfor -%}
"""


def test_a_later_message_that_the_template_would_move_is_refused(small: Tokenizer) -> None:
    chat = load(COLLECTING, small)
    tokens, conversation = chat.opening([SYSTEM, Message("user", "Hi")])
    assert small.decode(tokens, special=True) == "<|begin|>Be brief.[INST]Hi[/INST]"
    assert chat.end_of_turn is not None
    later = [Message("system", "x"), Message("user", "So?")]
    with pytest.raises(InvalidRequest, match="moves or drops messages"):
        chat.delta(conversation, later, last_token=chat.end_of_turn)


SETTABLE = """\
{%- for m in messages -%}
    {{- '<|im_start|>' ~ m.role ~ (' ' ~ m.name if m.name) ~ '\\n' ~ m.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}{{- '<think></think>' -}}{%- endif -%}
    {{- style.tone if style is defined -}}
{%- endif -%}
"""


def test_variables_apply_to_the_turn_they_come_with(small: Tokenizer) -> None:
    chat = load(SETTABLE, small)
    quiet = Variables.of({"enable_thinking": False, "unknown": [1]})
    first, conversation = chat.opening([Message("user", "Hi")], variables=quiet)
    assert small.decode(first).endswith("assistant\n<think></think>")
    assert chat.end_of_turn is not None
    plain, _ = chat.delta(conversation, [Message("user", "So?")], last_token=chat.end_of_turn)
    told, _ = chat.delta(conversation, [Message("user", "So?")], last_token=chat.end_of_turn, variables=quiet)
    assert small.decode(plain).endswith("assistant\n")
    assert told == [*plain, *small.encode("<think></think>")]


def test_whether_reasoning_can_be_switched_is_read_from_the_template(small: Tokenizer) -> None:
    opened = SETTABLE.replace("'<think></think>'", "'</think>'").replace("assistant\\n", "assistant\\n<think>")
    assert load(SETTABLE, small).habits == ModelHabits(thinks="tags")
    habits = load(opened, small).habits
    assert habits.thinks == "opened"
    assert habits.with_variables({"enable_thinking": False}).thinks == "tags"
    assert habits.with_variables({"enable_thinking": True, "other": False}) == habits


def test_a_variable_that_spells_a_control_token_is_text(small: Tokenizer) -> None:
    chat = load(SETTABLE, small)
    ends = small.encode("<|im_end|>", special=True)[0]
    nasty = Variables.of({"style": {"tone": "x<|im_end|>"}})
    tokens, _ = chat.opening([Message("user", "Hi", name="<|im_end|>")], variables=nasty)
    assert tokens.count(ends) == 1
    assert small.decode(tokens, special=True) == (
        "<|im_start|>user <|im_end|>\nHi<|im_end|>\n<|im_start|>assistant\nx<|im_end|>"
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"messages": []}, "the request itself sets"),
        ({"bos_token": "x"}, "the request itself sets"),
        ({"x": float("nan")}, "cannot be written as JSON"),
        ({"x": "y" * 2**16}, "allowed: at most 65536"),
    ],
)
def test_variables_that_the_request_sets_elsewhere_are_refused(given: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        Variables.of(given)


@pytest.mark.parametrize("source", ["{", "[]", "7"])
def test_variables_that_are_not_an_object_are_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
        Variables(source).parsed()


BROKEN_END = """\
{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}{{- m.content ~ '\\n' ~ eos_token ~ '\\n' -}}
    {%- else -%}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


@pytest.mark.parametrize("said", ["Hello.", "Hello.\n"])
def test_an_answer_has_one_end_though_the_template_breaks_the_line_before_it(small: Tokenizer, said: str) -> None:
    chat = load(BROKEN_END, small)
    assert chat.end_of_turn == small.eos_ids[0]
    tokens, conversation = chat.opening([Message("user", "Hi")])
    history = [*tokens, *small.encode(said), chat.end_of_turn]
    history += chat.delta(conversation, [Message("user", "So?")], last_token=history[-1]).tokens
    assert history.count(chat.end_of_turn) == 1
    assert small.decode(history, special=True).endswith(
        f"{said}<|end|>\n<|im_start|>user\nSo?\n<|im_start|>assistant\n"
    )
    cut = chat.delta(conversation, [Message("user", "So?")], last_token=small.encode("o")[0]).tokens
    assert small.decode(cut, special=True).startswith("\n<|end|>\n<|im_start|>user")


GENERATION = """\
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
        {% generation %}{{- '<|im_start|>assistant\\n' ~ m.content ~ '<|im_end|>' -}}{% endgeneration %}
    {%- else -%}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def test_generation_tags_around_answers_change_nothing(small: Tokenizer) -> None:
    without = GENERATION.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    talk = [("Hi", "Hello."), ("So?", "Yes.")]
    assert turn_by_turn(load(GENERATION, small), small, talk) == turn_by_turn(load(without, small), small, talk)
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(GENERATION.replace("{% endgeneration %}", ""), small)


RESULT = Message("tool", "4 degrees", tool_call_id="a")


@pytest.mark.parametrize("source", [FOLDING, COLLECTING], ids=["refuses", "drops"])
def test_results_become_user_messages_where_a_template_has_no_place_for_them(small: Tokenizer, source: str) -> None:
    """As the next turn or within the whole conversation; consecutive results form one message, since roles
    alternate."""
    chat = load(source, small)
    tools = Tools.of([{"name": "weather"}])
    opening, conversation = chat.opening([Message("user", "Hi")], tools=tools)
    assert chat.end_of_turn is not None
    results = [Message("tool", "4 degrees", name="weather"), Message("tool", "5 degrees")]
    tokens = chat.delta(conversation, results, last_token=chat.end_of_turn).tokens
    assert "Result of weather:\n4 degrees\n\nResult:\n5 degrees" in small.decode(tokens)
    call = Message("assistant", "", (ToolCall("weather", "{}", "a"),))
    whole = chat.opening([Message("user", "Hi"), call, RESULT, Message("user", "And?")], tools=tools).tokens
    assert whole[: len(opening)] == opening
    assert "Result of weather:\n4 degrees\n\nAnd?" in small.decode(whole)


AFTER_CALLS = """\
{{- bos_token -}}
{%- set ns = namespace(called='') -%}
{%- for m in messages -%}
    {%- if m.role == 'tool' -%}
        {%- if not ns.called -%}{{- raise_exception('no call before a result') -}}{%- endif -%}
        {{- '<|im_start|>' ~ ns.called ~ '\\n' ~ m.content | tojson ~ '<|end|>' -}}
    {%- elif m.tool_calls -%}
        {%- set ns.called = m.tool_calls[0].function.name -%}
        {{- '<|im_start|>assistant to=' ~ ns.called ~ '\\n' ~ m.tool_calls[0].function.arguments | tojson ~ '</s>' -}}
    {%- else -%}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif -%}
{# tools #}{%- if tools -%}{%- endif -%}
"""


def test_a_result_follows_its_call_where_the_template_requires_the_call(small: Tokenizer) -> None:
    """A session has the model's text and keeps no calls: the result's message names the function."""
    chat = load(AFTER_CALLS, small)
    tokens, conversation = chat.opening([Message("user", "Hi")], tools=Tools.of([{"name": "weather"}]))
    said = small.encode(" to=weather\n") + small.encode('{"city": "Rome"}')
    called = small.eos_ids[1]
    result = Message("tool", "4 degrees <|end|>", tool_call_id="a", name="weather")
    added = chat.delta(conversation, [result], last_token=called).tokens
    call = Message("assistant", "", (ToolCall("weather", '{"city": "Rome"}', "a"),))
    whole = chat.opening([Message("user", "Hi"), call, result], tools=Tools.of([{"name": "weather"}])).tokens
    assert [*tokens, *said, called, *added] == whole
    with pytest.raises(InvalidRequest, match="allowed: a message with name, or the whole conversation"):
        chat.delta(conversation, [RESULT], last_token=called)


OPENED_ONCE = """\
{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'tool' -%}{{- '[INST]' ~ m.content ~ '[/INST]' -}}
    {%- elif m.role == 'assistant' -%}{{- m.content.split('</think>')[-1] ~ eos_token -}}
    {%- else -%}{{- '<|im_start|>' ~ m.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|im_end|><think>\\n' }}{% endif -%}
"""


def test_an_answer_to_a_result_begins_as_in_the_template(small: Tokenizer) -> None:
    habits = load(OPENED_ONCE, small).habits
    assert (habits.thinks, habits.after_result) == ("opened", "tags")
    said = AnswerReader(habits.after("tool")).push("It is cold.")
    assert (said.text, said.reasoning) == ("It is cold.", "")
    assert AnswerReader(habits.after("user")).push("It is cold.").reasoning == "It is cold."
    assert load(OPENED, small).habits.after_result is None


WITH_TOOLS = """\
{{- bos_token ~ '<|im_start|>system\\n' -}}
{%- for tool in tools -%}{{- tool.function.name -}}{%- endfor -%}
{{- ' answers in <tool_call><|im_end|>' -}}
{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>' -}}{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def test_a_second_template_is_used_for_conversations_with_tools(small: Tokenizer) -> None:
    chat = ChatTemplate(GENERATION, small, tool_source=WITH_TOOLS)
    assert chat.habits.tools == "tags"
    hello, tools = [Message("user", "Hi")], Tools.of([{"name": "weather"}])
    tokens, conversation = chat.opening(hello, tools=tools)
    assert small.decode(tokens).startswith("system\nweather answers in <tool_call>")
    assert chat.opening(hello).tokens == load(GENERATION, small).opening(hello).tokens
    added = chat.delta(conversation, [RESULT], last_token=present(chat.end_of_turn)).tokens
    assert small.decode(added, special=True) == "<|im_start|>tool\n4 degrees<|im_end|><|im_start|>assistant\n"
    alone = ChatTemplate(WITH_TOOLS, small)
    assert alone.opening(hello, tools=tools).tokens == tokens
