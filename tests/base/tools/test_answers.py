"""Calls and reasoning are found in answers as the text arrives, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.tools.answers import AnswerReader, Reading
from tenuto.base.tools.definitions import ModelHabits
from tenuto.base.tools.tool_use import ToolUse
from tests.base.tools.calls import (
    CALLED,
    CHANNEL_MARKS,
    FUNCTION_TAGS,
    GRANITE,
    IN_TAGS,
    JSON,
    LATER_MISTRAL,
    LIST,
    LLAMA,
    NAMED,
    NEMO,
    NO_ARGUMENTS,
    ROME,
    STOP,
    TAGS,
    parts_of,
    read,
)

TAGGED = '{"name": "stop", "arguments": {"x": "</tool_call>"}}'


SAID = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
TO_STOP = "<|channel|>commentary to=functions.stop<|message|>{}"
THOUGHT = "<|channel|>analysis<|message|>hm <x><|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("habits", "text", "expected"),
    [
        (TAGS, f"<tool_call>\n{ROME}\n</tool_call>", ("", "", [CALLED])),
        (TAGS, f"Let me see.\n<tool_call>{ROME}</tool_call>", ("Let me see.", "", [CALLED])),
        (TAGS, f"<tool_call>{ROME}</tool_call>\n<tool_call>{STOP}</tool_call>\n", ("", "", [CALLED, ("stop", {})])),
        (TAGS, f"<tool_call>{ROME}", ("", "", [CALLED])),  # cut off, but complete
        (
            TAGS,
            '<tool_call>{"name": "stop", "arguments": {"x": "</tool_call>"}}</tool_call> b',
            ("b", "", [("stop", {"x": "</tool_call>"})]),
        ),
        (TAGS, '<tool_call>{"name": "</tool_call> b', ('<tool_call>{"name": "</tool_call> b', "", [])),
        (
            TAGS,
            f'<tool_call>{{"name": "stop", "arguments": {{"a": "b}}}}</tool_call><tool_call>{STOP}</tool_call> b',
            ('<tool_call>{"name": "stop", "arguments": {"a": "b}}</tool_call>b', "", [("stop", {})]),
        ),
        (TAGS, f"<tool_call>{STOP}; {TAGGED}</tool_call>", ("", "", [("stop", {}), ("stop", {"x": "</tool_call>"})])),
        (
            TAGS,
            f"<tool_call>it's \"x</tool_call><tool_call>{ROME}</tool_call>",
            ("<tool_call>it's \"x</tool_call>", "", [CALLED]),
        ),
        (NAMED, 'weather{"city": "}\\"{"}stop {}', ("", "", [("weather", {"city": '}"{'}), ("stop", {})])),
        (NAMED, 'weather{"city": "\\ud800"} b', ('weather{"city": "\\ud800"} b', "", [])),
        (NAMED, 'weather{"city": "Rome"}stop {}', ("", "", [CALLED, ("stop", {})])),
        (NAMED, ' weatherabc123DEF{"city": "Rome"}', ("", "", [CALLED])),
        (NAMED, "weather is fine", ("weather is fine", "", [])),
        (NAMED, "weather", ("weather", "", [])),
        (NAMED, 'weather{"city": "Ro', ('weather{"city": "Ro', "", [])),
        (NAMED, "other{}", ("other{}", "", [])),
        (TAGS, "a <tool_call>nonsense</tool_call> b", ("a <tool_call>nonsense</tool_call> b", "", [])),
        (TAGS, '<tool_call>{"name": "other", "arguments": {}}</tool_call>', ...),
        (TAGS, "1 < 2 <tool", ("1 < 2 <tool", "", [])),
        (TAGS, "no calls \n", ("no calls \n", "", [])),
        (JSON, ROME, ("", "", [CALLED])),
        (JSON, f" [{ROME}, {STOP}]", ("", "", [CALLED, ("stop", {})])),
        (JSON, f"{ROME}; {STOP}", ("", "", [CALLED, ("stop", {})])),
        (LLAMA, '{"name": "weather", "parameters": {"city": "Rome"}}', ("", "", [CALLED])),
        (JSON, '{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}', ("", "", [CALLED])),
        (JSON, '{"some": "json"}', ('{"some": "json"}', "", [])),
        (JSON, f"text {ROME}", (f"text {ROME}", "", [])),
        (JSON, '{"name": "weather", "arguments": [1]}', ('{"name": "weather", "arguments": [1]}', "", [])),
        (LIST, f"Sure.\n<TOOLCALL>[{ROME}, {STOP}]</TOOLCALL>", ("Sure.", "", [CALLED, ("stop", {})])),
        (LIST, "a <TOOLCALL>[]</TOOLCALL>", ("a <TOOLCALL>[]</TOOLCALL>", "", [])),
        (FUNCTION_TAGS, IN_TAGS, ("", "", [CALLED])),
        (FUNCTION_TAGS, f"Let me see.\n{IN_TAGS}\n{NO_ARGUMENTS}\n", ("Let me see.", "", [CALLED, ("stop", {})])),
        (FUNCTION_TAGS, IN_TAGS[12:-13], ("", "", [CALLED])),  # without the outer tags
        (FUNCTION_TAGS, IN_TAGS[:-12], ("", "", [CALLED])),  # cut off, but complete
        (FUNCTION_TAGS, IN_TAGS[:-24], (IN_TAGS[:-24], "", [])),
        (FUNCTION_TAGS, IN_TAGS.replace("\n</parameter>", ""), ("", "", [CALLED])),
        (FUNCTION_TAGS, IN_TAGS.replace("\n", ""), ("", "", [CALLED])),
        (FUNCTION_TAGS, f"<tool_call>{ROME}</tool_call> b", ("b", "", [CALLED])),
        (FUNCTION_TAGS, IN_TAGS.replace("weather", "other"), ...),
        (
            FUNCTION_TAGS,
            IN_TAGS.replace("Rome", " a\n</parameter> <b>\n\n</tool_call>"),
            ("", "", [("weather", {"city": " a\n</parameter> <b>\n\n</tool_call>"})]),
        ),
        (FUNCTION_TAGS, "a < b <tool_calls> <func", ("a < b <tool_calls> <func", "", [])),
        (LATER_MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', ("", "", [CALLED])),
        (LATER_MISTRAL, 'I look. [TOOL_CALLS]weather[ARGS]{"city": "Rome"}', ("I look.", "", [CALLED])),
        (
            LATER_MISTRAL,
            'a\n[TOOL_CALLS]weather[CALL_ID]abc123DEF[ARGS]{"city": "Rome"}[TOOL_CALLS]stop[ARGS]{}',
            ("a", "", [CALLED, ("stop", {})]),
        ),
        (LATER_MISTRAL, "a [TOOL_CALLS]other[ARGS]{}", ("a [TOOL_CALLS]other[ARGS]{}", "", [])),
        (LATER_MISTRAL, "a [TOOL", ("a [TOOL", "", [])),
        (NEMO, f"Sure! [TOOL_CALLS][{ROME}]", ("Sure!", "", [CALLED])),
        (NEMO, f"[TOOL_CALLS][{ROME}]", ("", "", [CALLED])),
        (NEMO, f"[see] [TOOL_CALLS][{ROME}, {STOP}]", ("[see]", "", [CALLED, ("stop", {})])),
        (NEMO, f"[{ROME}]", ("", "", [CALLED])),
        (NEMO, "Mistral writes [TOOL_CALLS].", ("Mistral writes [TOOL_CALLS].", "", [])),
        (GRANITE, f"Let me see.\n<|tool_call|>[{ROME}]", ("Let me see.", "", [CALLED])),
        (
            CHANNEL_MARKS,
            f'{THOUGHT}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"city": "Rome"}}',
            ("", "hm <x>", [CALLED]),
        ),
        (
            CHANNEL_MARKS,
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}',
            ("", "", [CALLED]),
        ),
        (
            CHANNEL_MARKS,
            THOUGHT + SAID + TO_STOP + "<|start|>assistant<|channel|>final<|message|> Done.",
            ("I look. Done.", "hm <x>", [("stop", {})]),
        ),
        (CHANNEL_MARKS, f"{THOUGHT}<|channel|>final<|message|>1 <|x", ("1 <|x", "hm <x>", [])),
        (CHANNEL_MARKS, "<|channel|>commentary to=functions.other<|message|>{}", ("{}", "", [])),
        (CHANNEL_MARKS, "no channels", ("no channels", "", [])),
        (CHANNEL_MARKS, f"{THOUGHT}<|channel|>fin", ("", "hm <x>", [])),
        (ModelHabits("tags", thinks="tags"), "<think>\nhm\n</think>\n\nyes", ("yes", "hm", [])),
        (ModelHabits("tags", thinks="tags"), "no thought", ("no thought", "", [])),
        (ModelHabits("tags", thinks="tags"), "<thin", ("<thin", "", [])),
        (ModelHabits("tags", thinks="opened"), f"hm</think><tool_call>{ROME}</tool_call>", ("", "hm", [CALLED])),
        (ModelHabits("tags", thinks="opened"), "never done", ("", "never done", [])),
    ],
    ids=str,
)
def test_an_answer_is_parsed_alike_however_it_is_cut(habits: ModelHabits, text: str, expected: object) -> None:
    wanted = (text, "", []) if expected is ... else expected
    assert parts_of(read(habits, [text])) == wanted
    assert parts_of(read(habits, list(text))) == wanted
    for width in (2, 3, 7):
        assert parts_of(read(habits, [text[at : at + width] for at in range(0, len(text), width)])) == wanted


@given(
    st.lists(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", ROME, STOP, "<think>", "</think>", "\n", " ", "x", "{", '"', "\\"),
                *("<function=stop>", "<parameter=city>", "</parameter>", "</function>", "<TOOLCALL>", "</TOOLCALL>"),
                *("[TOOL_CALLS]", "[ARGS]", "stop", "{}", "[", "]", "<|channel|>", "analysis", " to=functions.stop"),
                *("<|message|>", "<|end|>", "<|start|>"),
            ]
        )
    ),
    st.sampled_from(
        [
            *(TAGS, JSON, LIST, FUNCTION_TAGS, CHANNEL_MARKS, LATER_MISTRAL, NEMO, NAMED),
            *(ModelHabits("tags", thinks="tags"), ModelHabits("json", thinks="opened")),
        ]
    ),
    st.randoms(use_true_random=False),
)
def test_any_pieces_of_any_text_are_parsed_alike(parts: list[str], habits: ModelHabits, random) -> None:
    text = "".join(parts)
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(5))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parts_of(read(habits, pieces)) == parts_of(read(habits, [text]))


@pytest.mark.parametrize(
    ("habits", "text"),
    [
        (NAMED, 'weather{"city": "' + "Rome " * 400 + '"}'),
        (TAGS, '<tool_call>{"name": "stop", "arguments": {"x": "' + "</tool_call>" * 150 + '"}}</tool_call>'),
    ],
    ids=["named", "tags"],
)
def test_a_long_call_is_decoded_once(habits: ModelHabits, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = list[int]()
    whole = json.JSONDecoder.raw_decode

    def counting(decoder: json.JSONDecoder, text: str, idx: int = 0) -> tuple[Any, int]:
        decoded.append(len(text))
        return whole(decoder, text, idx)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counting)
    assert len(read(habits, list(text)).calls) == 1
    assert len(decoded) <= 2  # and once as it is checked


@pytest.mark.parametrize("separator", [", ", "\n", "; ", ","])
def test_forced_calls_are_told_as_soon_as_they_are_complete(separator: str) -> None:
    one, two = '{"name": "weather", "arguments": {"city": "a}{["}}', '{"name": "clock", "arguments": {}}'
    text = f"[{one}{separator}{two}]" if "," in separator else f"{one}{separator}{two}"
    reading = Reading(ModelHabits("json"), ("weather", "clock"), forced=True)
    reader, told = reading.reader("x"), list[tuple[int, str]]()
    for at, letter in enumerate(text):
        told += [(at, call.name) for call in reader.push(letter).calls]
    assert told == [(text.index(one) + len(one) - 1, "weather"), (text.index(two) + len(two) - 1, "clock")]
    assert not reader.finish()
    whole = Reading(ModelHabits("json"), ("weather", "clock")).reader("x").read(text, ended=True)
    assert whole == reading.reader("x").read(text, ended=True)


def test_the_rest_of_a_forced_call_that_was_cut_short_is_text() -> None:
    reading = Reading(ModelHabits("json"), ("weather",), forced=True)
    said = reading.reader().read('{"name": "weather", "arguments": {}}\n{"name": "wea', ended=True)
    assert [call.name for call in said.calls] == ["weather"]
    assert said.text == '{"name": "wea'
    assert reading.reader().read("[", ended=True).text == "["


def test_without_tools_calls_are_text() -> None:
    assert parts_of(read(TAGS, [f"<tool_call>{ROME}</tool_call>"], ())) == (f"<tool_call>{ROME}</tool_call>", "", [])


def test_text_is_delivered_as_soon_as_it_cannot_be_a_call() -> None:
    reader = AnswerReader(TAGS, ["f"])
    assert [reader.push(piece).text for piece in ("Hi", " <", "b>", "<tool", "_call>")] == ["Hi", "", " <b>", "", ""]


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("12", ("integer",), 12),
        ("12", ("string",), "12"),
        ("12", (), "12"),
        ("12", ("string", "null"), "12"),
        ("null", ("string", "null"), None),
        ("True", ("boolean",), True),
        ('["a", 1.5]', ("array",), ["a", 1.5]),
        ('{"a": null}', ("object",), {"a": None}),
        ("twelve", ("integer",), "twelve"),
    ],
)
def test_unquoted_arguments_are_parsed_by_their_schema(text: str, types: Any, value: Any) -> None:
    said = IN_TAGS.replace("Rome", text)
    schema: Any = {"properties": {"city": {"type": list(types)} if types else {}}}
    use = ToolUse(({"name": "weather", "parameters": schema},))
    reader = use.reading(FUNCTION_TAGS, None).reader()
    (call,) = reader.push(said).calls
    assert call.parsed() == {"city": value}
