"""Calls and reasoning in answers: found as the text arrives, however it is cut, and forced by grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.answers import AnswerReader, Said
from tenuto.base.tools.call_grammars import calls_grammar, shape_of
from tenuto.base.tools.definitions import CHANNELS, MARKS, THOUGHTS, ModelHabits, ToolFormat
from tenuto.base.tools.definitions import TAGS as TAGGED_BY
from tenuto.base.tools.grammar import Grammar
from tenuto.base.tools.tool_use import ToolUse
from tenuto.text.grammars import GrammarCompiler
from tenuto.text.tokenizer import Tokenizer
from tests.present import present
from tests.text.test_grammars import follows

TAGS, JSON, LIST = ModelHabits("tags"), ModelHabits("json"), ModelHabits("list")
FUNCTION_TAGS, CHANNEL_MARKS = ModelHabits("functions"), ModelHabits("channels")
LATER_MISTRAL = ModelHabits("named", marks=(("[TOOL_CALLS]", 1), ("[CALL_ID]", 2), ("[ARGS]", 3)))
NEMO, GRANITE = ModelHabits("json", marks=(("[TOOL_CALLS]", 1),)), ModelHabits("json", marks=(("<|tool_call|>", 1),))
LLAMA, NAMED = ModelHabits("json", "parameters"), ModelHabits("named")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = {"weather": SCHEMA, "stop": None}
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
TAGGED = '{"name": "stop", "arguments": {"x": "</tool_call>"}}'
STOP = '{"name": "stop", "arguments": {}}'


def read(habits: ModelHabits, pieces: Sequence[str], names: Sequence[str] = tuple(FUNCTIONS)) -> Said:
    reader, whole = AnswerReader(habits, names), Said()
    for said in [*map(reader.push, pieces), reader.finish()]:
        whole.text += said.text
        whole.reasoning += said.reasoning
        whole.calls += said.calls
    return whole


def told(said: Said) -> tuple[str, str, list[tuple[str, dict]]]:
    return said.text, said.reasoning, [(call.name, json.loads(call.arguments)) for call in said.calls]


CALLED = ("weather", {"city": "Rome"})
IN_TAGS = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
NO_ARGUMENTS = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
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
    assert told(read(habits, [text])) == wanted
    assert told(read(habits, list(text))) == wanted
    for width in (2, 3, 7):
        assert told(read(habits, [text[at : at + width] for at in range(0, len(text), width)])) == wanted


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
    assert told(read(habits, pieces)) == told(read(habits, [text]))


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


def test_without_tools_calls_are_text() -> None:
    assert told(read(TAGS, [f"<tool_call>{ROME}</tool_call>"], ())) == (f"<tool_call>{ROME}</tool_call>", "", [])


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


def test_an_argument_may_be_any_text_and_a_schema_that_cannot_be_forced_is_refused() -> None:
    functions = {"weather": {**SCHEMA, "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
    grammar = calls_grammar(FUNCTION_TAGS, functions, parallel=False)
    with_days = IN_TAGS.replace("</function>", "<parameter=days>\n3\n</parameter>\n</function>")
    assert follows(grammar, IN_TAGS)
    assert follows(grammar, with_days)
    assert follows(grammar, IN_TAGS.replace("Rome", 'é "x" <b>\n\n{'))
    assert not follows(grammar, with_days.replace("3", "three"))
    assert not follows(grammar, NO_ARGUMENTS)
    refused: tuple[Any, ...] = ({"anyOf": []}, {"properties": {"city": {"type": "string", "pattern": "a"}}})
    for schema in refused:
        with pytest.raises(InvalidRequest, match="cannot be forced to follow"):
            calls_grammar(FUNCTION_TAGS, {"weather": schema}, parallel=False)


@pytest.mark.parametrize("habits", [TAGS, JSON, LLAMA], ids=str)
@pytest.mark.parametrize("parallel", [False, True])
def test_every_call_that_a_grammar_allows_is_read_as_a_call(habits: ModelHabits, parallel: bool) -> None:
    grammar = calls_grammar(habits, FUNCTIONS, parallel=parallel)
    one, two = ROME.replace("arguments", habits.arguments), STOP.replace("arguments", habits.arguments)
    tagged = habits.tools == "tags"
    once = f"<tool_call>\n{one}\n</tool_call>" if tagged else one
    twice = f"{once}\n<tool_call>\n{two}\n</tool_call>" if tagged else f"[{one}, {two}]"
    assert follows(grammar, once)
    assert told(read(habits, [once]))[2] == [CALLED]
    assert follows(grammar, twice) is parallel
    assert told(read(habits, [twice]))[2] == [CALLED, ("stop", {})]
    assert not follows(grammar, "no call")
    assert not follows(grammar, once.replace("city", "town"))


ARGUMENTS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", 'a "b" {c}', "</tool_call> [x]", "é\n\\"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "weather": {"type": "object", "properties": {"stop": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NESTED = {"weather": ARGUMENTS, "weathers": {"type": "object", "maxProperties": 0}, "weather.abc123def": ARGUMENTS}


def marked_tokenizer() -> Tokenizer:
    """Returns a tokenizer of bytes and the control tokens of all formats."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*MARKS, *CHANNELS, *(tag for tags in TAGGED_BY.values() for tag in tags), *THOUGHTS])
    return Tokenizer(backend)


MARKED = marked_tokenizer()


def habits_with(tools: ToolFormat, *texts: str, **more: Any) -> ModelHabits:
    return ModelHabits(tools, marks=tuple((text, present(MARKED.control_id(text))) for text in texts), **more)


FORMATS = {
    "tags": ModelHabits("tags"),
    "tags that are control tokens": habits_with("tags", *TAGGED_BY["tags"], *THOUGHTS),
    "list": ModelHabits("list"),
    "a list between control tokens": habits_with("list", *TAGGED_BY["list"]),
    "functions": ModelHabits("functions"),
    "plain": ModelHabits("json"),
    "llama": ModelHabits("json", "parameters"),
    "mistral": habits_with("json", "[TOOL_CALLS]", short_ids=True),
    "granite": habits_with("json", "<|tool_call|>"),
    "phi": habits_with("json", "<|tool_call|>", "<|/tool_call|>"),
    "named": habits_with("named", "[TOOL_CALLS]", "[ARGS]"),
    "named with ids": habits_with("named", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "named without control tokens": ModelHabits("named"),
    "channels": habits_with("channels", *CHANNELS),
}


SIZE = MARKED.vocab_size
COMPILER = GrammarCompiler(MARKED, SIZE, ())  # so that control tokens do not end answers by themselves


def wander(grammar: Grammar, random: Random, begun: str, *, markup: bool = False) -> list[int]:
    """Returns the tokens of a random text of the grammar that begins with `begun`."""
    constraint, said = COMPILER.constraint(grammar), MARKED.encode(begun, special=markup)
    for token in said:
        assert not constraint.push(token)
    while True:
        masks = constraint.masks(())
        assert masks is not None
        bits = np.unpackbits(masks[0].view(np.uint8), count=SIZE + 1, bitorder="little")
        may = np.flatnonzero(bits[:SIZE]).tolist()
        if bits[SIZE] and (not may or random.random() < 0.5):
            return said
        said.append(random.choice(may))
        complete = constraint.push(said[-1])
        assert not constraint.failure
        assert len(said) < 2000
        if complete:
            return said


@pytest.mark.parametrize("habits", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("thinks", ["no", "tags"])
def test_any_text_of_a_grammar_of_calls_is_read_as_the_same_calls_however_it_is_cut(
    habits: ModelHabits, thinks: Any
) -> None:
    random, several, own_ids = Random(5), 0, habits.short_ids or habits.mark("[CALL_ID]") is not None
    if habits.tools != "channels":
        habits = replace(habits, thinks=thinks)
    functions = tuple({"name": name, "parameters": schema} for name, schema in NESTED.items())
    for _ in range(25):
        only = random.choice(["", "", "weather"])
        use = ToolUse(functions, "required", only, parallel=random.random() < 0.8)
        grammar = use.grammar(habits, None)
        assert grammar is not None
        thought = "<think>hm {</think>\n" if habits.thinks == "tags" else ""
        tokens = wander(grammar, random, thought, markup=habits.mark("<think>") is not None)
        text = MARKED.decode(tokens, special=True)
        assert habits.opens in text
        reader, whole = use.reading(habits, grammar).reader("a"), Said()
        cuts = sorted(random.sample(range(len(text)), min(len(text), random.choice((0, 1, 5, 40)))))
        for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            whole.add(reader.push(text[start:stop]))
        whole.add(reader.finish())
        at_once = use.reading(habits, grammar).reader("a")
        expected = at_once.push(text)
        expected.add(at_once.finish())
        assert (whole.text.strip(), expected.text) == ("", whole.text), text
        assert whole == expected
        assert 1 <= len(whole.calls) <= (99 if use.parallel and not only and habits.tools != "channels" else 1)
        several += len(whole.calls) > 1
        for call in whole.calls:
            assert only in ("", call.name)
            jsonschema.validate(call.parsed(), NESTED[call.name])
            assert not own_ids or call.id in text
        if habits.tools in ("tags", "list", "json"):
            assert text.rpartition("</think>")[2].count(f'"{habits.arguments}": ') >= len(whole.calls)
        if habits.tools in ("named", "json"):  # also if the control tokens are not written out
            plain = use.reading(habits, grammar).reader("a")
            bare = plain.push(MARKED.decode(tokens))
            bare.add(plain.finish())
            assert bare == whole
        assert len({call.id for call in whole.calls}) == len(whole.calls)
    assert several > 0 or habits.tools == "channels"


def test_a_structured_answer_is_written_to_its_channel() -> None:
    habits = FORMATS["channels"]
    shape = shape_of(habits, Grammar.of_schema({"type": "boolean"}), {}, forced=False, parallel=False)
    assert shape is not None
    for _ in range(5):
        text = MARKED.decode(wander(shape, Random(3), ""), special=True)
        said = AnswerReader(habits)
        whole = said.push(text)
        whole.add(said.finish())
        assert whole.text in ("true", "false")


def test_a_grammar_can_allow_calls_or_a_structured_answer() -> None:
    grammar = calls_grammar(TAGS, FUNCTIONS, parallel=False, answer=Grammar.of_schema({"type": "boolean"}))
    assert follows(grammar, "true")
    assert follows(grammar, f"<tool_call>\n{ROME}\n</tool_call>")
    assert not follows(grammar, "7")
    with pytest.raises(InvalidRequest, match="regex"):
        calls_grammar(TAGS, FUNCTIONS, parallel=False, answer=Grammar("regex", "a"))


@pytest.mark.parametrize("thinks", ["tags", "opened"])
def test_a_reasoning_model_reasons_before_it_follows_a_grammar(thinks: Any) -> None:
    habits = ModelHabits("tags", thinks=thinks)
    opening = "" if thinks == "opened" else "<think>"
    call = f"<tool_call>\n{ROME}\n</tool_call>"
    for functions, said, expected in (({}, "true", ("true", "hm {", [])), (FUNCTIONS, call, ("", "hm {", [CALLED]))):
        answer = Grammar.of_schema({"type": "boolean"})
        grammar = shape_of(habits, answer, functions, forced=False, parallel=False)
        assert grammar is not None
        assert follows(grammar, f"{opening}hm {{</think>\n\n{said}")
        assert follows(grammar, said) is (thinks == "tags")
        assert not follows(grammar, f"{opening}hm {{</think>\n\nno")
        use = ToolUse(tuple({"name": name} for name in functions))
        reader = use.reading(habits, grammar).reader()
        whole = reader.push(f"{opening}hm {{</think>\n\n{said}")
        rest = reader.finish()
        assert told(Said(whole.text + rest.text, whole.reasoning, whole.calls + rest.calls)) == expected


def test_a_grammar_without_room_for_reasoning_yields_none() -> None:
    habits = ModelHabits("tags", thinks="opened")
    grammar = Grammar("regex", "[0-9]+")
    assert shape_of(habits, grammar, {}, forced=False, parallel=False) == grammar
    assert ToolUse().reading(habits, grammar).reader().push("12").text == "12"
    assert ToolUse().reading(habits, None).reader().push("hm").reasoning == "hm"


def test_tools_are_rendered_whatever_the_choice() -> None:
    tools = [{"name": "weather", "parameters": SCHEMA}]
    assert ToolUse.of(tools, "none").told == ToolUse.of(tools).told
    assert ToolUse.of(tools, "none").reading(TAGS, None).names == ()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"name": "x\n"}]}, "tools[0].name"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [{"name": "f", "strict": 1}]}, "tools[0].strict"),
        ({"tools": [{"name": "f", "parameters": {"description": "\ud800"}}], "tool_choice": "required"}, "tools"),
    ],
    ids=str,
)
def test_invalid_tools_are_refused_by_their_field(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ToolUse.among(options)
    assert refused.value.param == param


def test_extra_fields_of_a_function_are_not_rendered() -> None:
    wrapped = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
    assert ToolUse.of([wrapped]).told == ToolUse.of([{"name": "weather", "parameters": SCHEMA}]).told


def test_arguments_must_be_objects() -> None:
    with pytest.raises(InvalidRequest, match="allowed: a schema of an object") as refused:
        calls_grammar(JSON, {"f": {"type": "string"}}, parallel=False)
    assert refused.value.param == "tools"
    for schema in (
        {"properties": {"a": {"enum": [1]}}},
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}},
        {"anyOf": [{"type": "object"}, {"type": "null"}]},
    ):
        grammar = calls_grammar(JSON, {"f": schema}, parallel=False)
        assert follows(grammar, '{"name": "f", "arguments": {}}')
        assert not follows(grammar, '{"name": "f", "arguments": null}')
