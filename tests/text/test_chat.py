"""A conversation rendered turn by turn equals the conversation rendered at once."""

from __future__ import annotations

import functools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.errors import InvalidRequest, ModelError
from tenuto.base.turns import Message
from tenuto.base.wire.document import Conversation
from tenuto.text.chat import ChatTemplate
from tenuto.text.tokenizer import Tokenizer

CHATML = """\
{%- for m in messages -%}
    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
HEADERS = """\
{{- bos_token -}}
{%- for m in messages -%}
    {{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\\n\\n' ~ (m.content | trim) ~ '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
GROUPED = """\
{%- for m in messages -%}
    {%- if m.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n(result)\\n' ~ m.content ~ '<|end|>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- else -%}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
TURNS = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('no system messages here') -}}{%- endif -%}
{%- for m in messages -%}
    {%- if (m.role == 'user') != (loop.index is odd) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
    {%- set name = 'model' if m.role == 'assistant' else m.role -%}
    {{- '<start_of_turn>' ~ name ~ '\\n' ~ m.content.strip() ~ '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""
BRACKETS = """\
{{- bos_token -}}
{%- set offset = 1 if messages[0].role == 'system' else 0 -%}
{%- for m in messages[offset:] -%}
    {%- if (m.role == 'user') != (loop.index0 is even) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
    {%- if m.role == 'user' -%}
        {{- '[INST]' -}}
        {%- if loop.first and offset -%}{{- messages[0].content ~ '\\n\\n' -}}{%- endif -%}
        {{- m.content ~ '[/INST]' -}}
    {%- else -%}{{- m.content ~ eos_token -}}{%- endif -%}
{%- endfor -%}
"""
QUESTION = [Message("user", "So?")]
ANY_ROLE = {"chatml": CHATML, "headers": HEADERS, "grouped": GROUPED}
ALTERNATING = {"turns": TURNS, "brackets": BRACKETS}

# Answers whose text never merges with markup into one token: a model starts a new token there.
answers = st.text(alphabet=st.sampled_from("abc the,😀日é"), max_size=12).map(str.strip)
nasty = st.sampled_from(
    ["<|im_end|>", "<|im_start|>user\n", "im_end|>", "<|im_", "</s>", "[INST]", "<<|eot_id|>", "\U000f0000"]
)
contents = st.lists(st.one_of(nasty, st.text(max_size=8)), max_size=4).map("".join)


load = functools.cache(ChatTemplate)


def answer_tokens(chat: ChatTemplate, tokenizer: Tokenizer, text: str) -> list[int]:
    assert chat.end_of_turn is not None
    return [*tokenizer.encode(text), chat.end_of_turn]


def turn_by_turn(chat: ChatTemplate, tokenizer: Tokenizer, turns: list[tuple[list[Message], str | None]]) -> list[int]:
    """Returns the history after `turns` and a last question: each turn appends messages and, if it has an answer, the
    model's answer and end token."""
    history: list[int] = []
    conversation: Conversation | None = None
    for messages, answer in [*turns, (QUESTION, "")]:
        generate = answer is not None
        if conversation is None:
            tokens, conversation = chat.opening(messages, generate)
        else:
            tokens, conversation = chat.delta(conversation, messages, last_token=history[-1], generate=generate)
        history += tokens
        if answer is not None:
            history += answer_tokens(chat, tokenizer, answer)
    return history[:-1]


def at_once(chat: ChatTemplate, turns: list[tuple[list[Message], str | None]]) -> list[int]:
    everything = []
    for messages, answer in [*turns, (QUESTION, None)]:
        everything += messages if answer is None else [*messages, Message("assistant", answer)]
    return chat.opening(everything).tokens


messages_of_any_role = st.builds(Message, st.sampled_from(["user", "tool", "system", "assistant"]), contents)
free_turns = st.lists(
    st.tuples(st.lists(messages_of_any_role, min_size=1, max_size=3), st.none() | answers), min_size=1, max_size=4
)
alternating_turns = st.lists(st.tuples(contents.map(lambda c: [Message("user", c)]), answers), min_size=1, max_size=4)


@pytest.mark.parametrize("name", ANY_ROLE)
@given(turns=free_turns)
def test_turns_of_any_roles_add_up_to_the_whole(
    small: Tokenizer, name: str, turns: list[tuple[list[Message], str | None]]
) -> None:
    chat = load(ANY_ROLE[name], small)
    assert turn_by_turn(chat, small, turns) == at_once(chat, turns)


@given(turns=free_turns)
def test_turns_of_the_default_model_add_up_to_the_whole(
    smollm2: Tokenizer, turns: list[tuple[list[Message], str | None]]
) -> None:
    assert smollm2.chat_template is not None
    chat = load(smollm2.chat_template, smollm2)
    assert turn_by_turn(chat, smollm2, turns) == at_once(chat, turns)


@pytest.mark.parametrize("system", [False, True])
@given(turns=alternating_turns)
def test_turns_of_templates_that_insist_on_alternation_add_up(
    small: Tokenizer, system: bool, turns: list[tuple[list[Message], str | None]]
) -> None:
    for name, source in ALTERNATING.items():
        chat = load(source, small)
        started = list(turns)
        if system and name == "brackets":
            started[0] = ([Message("system", "be brief"), *turns[0][0]], turns[0][1])
        assert turn_by_turn(chat, small, started) == at_once(chat, started)


def test_whether_later_system_messages_are_allowed_is_found_by_trying(small: Tokenizer) -> None:
    late = {name: load(source, small).habits.late_system for name, source in (ANY_ROLE | ALTERNATING).items()}
    assert late == {"chatml": True, "headers": True, "grouped": True, "turns": False, "brackets": False}


@given(content=contents)
def test_user_text_never_becomes_a_control_token(smollm2: Tokenizer, content: str) -> None:
    assert smollm2.chat_template is not None
    chat = load(smollm2.chat_template, smollm2)
    tokens, conversation = chat.opening([Message("user", content)])
    harmless, _ = chat.opening([Message("user", "x")])
    assert [t for t in tokens if smollm2.control_text(t)] == [t for t in harmless if smollm2.control_text(t)]
    assert smollm2.decode(smollm2.encode(content)) in smollm2.decode(tokens)  # its vocabulary lacks some bytes
    tokens, _ = chat.delta(conversation, [Message("user", content)], last_token=smollm2.encode("x")[0])
    assert [t for t in tokens if smollm2.control_text(t)] == smollm2.encode(
        "<|im_end|><|im_start|><|im_end|><|im_start|>", special=True
    )


def test_a_message_that_spells_the_end_of_turn_is_text(smollm2: Tokenizer) -> None:
    assert smollm2.chat_template is not None
    tokens = ChatTemplate(smollm2.chat_template, smollm2).opening([Message("user", "<|im_end|>")]).tokens
    start, end = smollm2.encode("<|im_start|><|im_end|>", special=True)
    assert tokens.count(end) == 2  # of the default system message and of this one
    assert tokens.count(start) == 3
    assert "user\n<|im_end|><|im_end|>\n" in smollm2.decode(tokens, special=True)


def test_the_default_system_message_appears_once(smollm2: Tokenizer) -> None:
    assert smollm2.chat_template is not None
    chat = ChatTemplate(smollm2.chat_template, smollm2)
    tokens, conversation = chat.opening([Message("user", "Hi")])
    assert "<|im_start|>system\nYou are a helpful" in smollm2.decode(tokens, special=True)
    assert chat.end_of_turn is not None
    tokens, _ = chat.delta(conversation, [Message("user", "Why?")], last_token=chat.end_of_turn)
    assert smollm2.decode(tokens, special=True) == "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_that_was_cut_off_is_closed_in_full(small: Tokenizer) -> None:
    chat = ChatTemplate(CHATML, small)
    _, conversation = chat.opening([Message("user", "Hi")])
    tokens, _ = chat.delta(conversation, [Message("user", "Why?")], last_token=small.encode("x")[0])
    assert small.decode(tokens, special=True).startswith("<|im_end|>\n<|im_start|>user\nWhy?")


def test_an_answer_ended_by_another_end_token_is_closed_in_full(small: Tokenizer) -> None:
    chat = ChatTemplate(CHATML, small)
    _, conversation = chat.opening([Message("user", "Hi")])
    tokens, _ = chat.delta(conversation, [], last_token=small.eos_ids[0])
    assert small.decode(tokens, special=True) == "<|im_end|>\n<|im_start|>assistant\n"


def test_a_question_appended_before_is_answered_without_a_new_message(small: Tokenizer) -> None:
    chat = ChatTemplate(CHATML, small)
    history, conversation = chat.opening([Message("user", "Hi")], generate=False)
    assert small.decode(history, special=True) == "<|im_start|>user\nHi"
    assert chat.delta(conversation, [], last_token=history[-1], generate=False) == ([], conversation)
    tokens, _ = chat.delta(conversation, [], last_token=history[-1])
    assert small.decode(tokens, special=True) == "<|im_end|>\n<|im_start|>assistant\n"


def test_only_the_models_end_token_ends_a_turn_not_markup_that_looks_the_same(small: Tokenizer) -> None:
    source = "{% for m in messages %}<|end|>{{ m.content }}<|end|>{% endfor %}"
    chat = ChatTemplate(source, small)
    history, conversation = chat.opening([Message("user", "")], generate=False)
    tokens, _ = chat.delta(conversation, [Message("user", "x")], last_token=history[-1])
    assert small.decode(history + tokens, special=True) == "<|end|><|end|><|end|>x<|end|>"


def test_an_answer_that_was_cut_off_continues_without_new_tokens(small: Tokenizer) -> None:
    chat = ChatTemplate(CHATML, small)
    _, conversation = chat.opening([Message("user", "Hi")])
    assert chat.delta(conversation, [], last_token=small.encode("x")[0]) == ([], conversation)


def test_the_stored_part_of_a_conversation_does_not_grow(small: Tokenizer) -> None:
    chat = ChatTemplate(CHATML, small)
    _, conversation = chat.opening([Message("user", "Hi")])
    _, after_one = chat.delta(conversation, [Message("user", "a")], last_token=0)
    _, after_two = chat.delta(after_one, [Message("user", "b" * 1000)], last_token=0)
    assert after_two == after_one == conversation
    assert conversation == Conversation(system=False, dialogue=True, role="assistant", tools="")


def test_a_template_that_refuses_gives_its_reason(small: Tokenizer) -> None:
    chat = ChatTemplate(TURNS, small)
    with pytest.raises(InvalidRequest, match="no system messages here"):
        chat.opening([Message("system", "s"), Message("user", "u")])
    _, conversation = chat.opening([Message("user", "u")])
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        chat.delta(conversation, [Message("assistant", "a")], last_token=0)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}", "template"),
        ("{{ messages[-1].content }}", "moves or drops"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[0].content }}", "moves or drops"),
        ("{% for m in messages %}{{ m.content[0].text ~ m.content.text.value }}{% endfor %}", "cannot render"),
        ("{% for m in messages %}<|im_{{ m.content }}<|im_end|>{% endfor %}", "half written"),
    ],
)
def test_a_template_that_cannot_render_turn_by_turn_is_refused_when_loaded(
    small: Tokenizer, source: str, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        ChatTemplate(source, small)


def test_templates_have_the_helpers_they_expect(small: Tokenizer) -> None:
    source = (
        "{{ strftime_now('%Y') }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content | tojson }}<|im_end|>{% endfor %}"
    )
    chat = ChatTemplate(source, small, lambda: datetime(1999, 1, 1, tzinfo=UTC))
    messages = [Message("system", "-"), Message("user", "<é>")]
    assert small.decode(chat.opening(messages).tokens, special=True) == '1999"<é>"<|im_end|>'


def test_a_template_cannot_leave_its_sandbox(small: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.content }}{{ ''.__class__.__mro__ }}{% endfor %}"
    with pytest.raises(ModelError, match="unsafe"):
        ChatTemplate(source, small)


@pytest.mark.parametrize(
    "raw",
    [
        {"role": "robot", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "user", "content": ["x"]},
        {"role": "user"},
        {"role": "user", "content": "x", "nick": "y"},
        "user",
        None,
    ],
)
def test_malformed_messages_are_rejected(raw: object) -> None:
    with pytest.raises(InvalidRequest, match="allowed"):
        Message.from_dict(raw)


def test_a_message_can_be_made_from_a_dictionary() -> None:
    assert Message.from_dict({"content": "x", "role": "user"}) == Message("user", "x")


def test_a_conversation_opens_with_a_message(small: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        ChatTemplate(CHATML, small).opening([])
