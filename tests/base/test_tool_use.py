"""Calls and thoughts in answers: found as the text arrives, whatever pieces it arrives in, and forced by grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.answers import AnswerReader, Said
from tenuto.base.errors import InvalidRequest
from tenuto.base.grammar import Grammar
from tenuto.base.tool_use import ToolUse, calls_grammar, shape_of
from tenuto.base.tools import ModelHabits
from tenuto.text.grammars import GrammarCompiler
from tests.text.test_grammars import SIZE, TOKENS, follows

TAGS, JSON = ModelHabits("tags"), ModelHabits("json")
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


@pytest.mark.parametrize(
    ("habits", "text", "expected"),
    [
        (TAGS, f"<tool_call>\n{ROME}\n</tool_call>", ("", "", [CALLED])),
        (TAGS, f"Let me see.\n<tool_call>{ROME}</tool_call>", ("Let me see.", "", [CALLED])),
        (TAGS, f"<tool_call>{ROME}</tool_call>\n<tool_call>{STOP}</tool_call>\n", ("", "", [CALLED, ("stop", {})])),
        (TAGS, f"<tool_call>{ROME}", ("", "", [CALLED])),  # cut off, but whole
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
        (ModelHabits("tags", thinks="tags"), "<think>\nhm\n</think>\n\nyes", ("yes", "hm", [])),
        (ModelHabits("tags", thinks="tags"), "no thought", ("no thought", "", [])),
        (ModelHabits("tags", thinks="tags"), "<thin", ("<thin", "", [])),
        (ModelHabits("tags", thinks="opened"), f"hm</think><tool_call>{ROME}</tool_call>", ("", "hm", [CALLED])),
        (ModelHabits("tags", thinks="opened"), "never done", ("", "never done", [])),
    ],
    ids=str,
)
def test_an_answer_is_taken_apart_alike_in_whatever_pieces_it_comes(
    habits: ModelHabits, text: str, expected: object
) -> None:
    wanted = (text, "", []) if expected is ... else expected
    assert told(read(habits, [text])) == wanted
    assert told(read(habits, list(text))) == wanted
    for width in (2, 3, 7):
        assert told(read(habits, [text[at : at + width] for at in range(0, len(text), width)])) == wanted


@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", ROME, STOP, "<think>", "</think>", "\n", " ", "x", "{", '"', "\\"]
        )
    ),
    st.sampled_from([TAGS, JSON, ModelHabits("tags", thinks="tags"), ModelHabits("json", thinks="opened")]),
    st.randoms(use_true_random=False),
)
def test_any_pieces_of_any_text_say_the_same(parts: list[str], habits: ModelHabits, random) -> None:
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


def test_text_is_told_as_soon_as_it_cannot_be_a_call() -> None:
    reader = AnswerReader(TAGS, ["f"])
    assert [reader.push(piece).text for piece in ("Hi", " <", "b>", "<tool", "_call>")] == ["Hi", "", " <b>", "", ""]


@pytest.mark.parametrize("habits", [TAGS, JSON, LLAMA], ids=str)
@pytest.mark.parametrize("parallel", [False, True])
def test_what_a_grammar_of_calls_allows_is_read_as_calls(habits: ModelHabits, parallel: bool) -> None:
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
OPENS, CLOSES = sorted(TOKENS.control_id(text) or 0 for text in TOKENS.control_texts)
FORMATS = {
    "tags": ModelHabits("tags"),
    "plain": ModelHabits("json"),
    "llama": ModelHabits("json", "parameters"),
    "mistral": ModelHabits("json", opens=OPENS, short_ids=True),
    "granite": ModelHabits("json", opens=OPENS),
    "phi": ModelHabits("json", opens=OPENS, closes=CLOSES),
    "named": ModelHabits("named", opens=OPENS, before_arguments=CLOSES),
    "named with ids": ModelHabits("named", opens=OPENS, before_id=OPENS, before_arguments=CLOSES),
    "named without control tokens": ModelHabits("named"),
}


COMPILER = GrammarCompiler(TOKENS, SIZE, ())  # so that control tokens do not end answers by themselves


def wander(grammar: Grammar, random: Random, begun: str) -> list[int]:
    """Tokens of a text of the grammar, at random, that begins with `begun`."""
    constraint, said = COMPILER.constraint(grammar), TOKENS.encode(begun)
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
def test_whatever_a_grammar_of_calls_can_say_is_read_as_the_same_calls_in_any_pieces(
    habits: ModelHabits, thinks: Any
) -> None:
    random, several, own_ids = Random(5), 0, habits.short_ids or habits.before_id is not None
    habits = replace(habits, thinks=thinks)
    functions = tuple({"name": name, "parameters": schema} for name, schema in NESTED.items())
    for _ in range(25):
        only = random.choice(["", "", "weather"])
        use = ToolUse(functions, "required", only, parallel=random.random() < 0.8)
        grammar = use.grammar(habits, None)
        assert grammar is not None
        tokens = wander(grammar, random, "<think>hm {</think>\n" if thinks == "tags" else "")
        assert (OPENS in tokens) is (habits.opens is not None)
        text = TOKENS.decode(tokens)
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
        assert 1 <= len(whole.calls) <= (99 if use.parallel and not only else 1)
        several += len(whole.calls) > 1
        for call in whole.calls:
            assert only in ("", call.name)
            jsonschema.validate(call.parsed(), NESTED[call.name])
            assert not own_ids or call.id in text
        said = text.rpartition("</think>")[2]
        assert said.count(f'"{habits.arguments}": ') >= len(whole.calls) or habits.tools == "named"
        assert len({call.id for call in whole.calls}) == len(whole.calls)
    assert several > 0


def test_calls_or_an_answer_in_another_shape() -> None:
    grammar = calls_grammar(TAGS, FUNCTIONS, parallel=False, answer=Grammar.of_schema({"type": "boolean"}))
    assert follows(grammar, "true")
    assert follows(grammar, f"<tool_call>\n{ROME}\n</tool_call>")
    assert not follows(grammar, "7")
    with pytest.raises(InvalidRequest, match="regex"):
        calls_grammar(TAGS, FUNCTIONS, parallel=False, answer=Grammar("regex", "a"))


@pytest.mark.parametrize("thinks", ["tags", "opened"])
def test_a_model_that_thinks_does_so_before_it_follows_a_grammar(thinks: Any) -> None:
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


def test_where_a_grammar_has_no_room_for_thoughts_there_are_none() -> None:
    habits = ModelHabits("tags", thinks="opened")
    grammar = Grammar("regex", "[0-9]+")
    assert shape_of(habits, grammar, {}, forced=False, parallel=False) == grammar
    assert ToolUse().reading(habits, grammar).reader().push("12").text == "12"
    assert ToolUse().reading(habits, None).reader().push("hm").reasoning == "hm"


def test_a_model_is_told_of_tools_whatever_the_choice() -> None:
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
def test_wrong_tools_are_refused_and_named(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ToolUse.among(options)
    assert refused.value.param == param


def test_what_others_write_of_a_function_is_not_told() -> None:
    wrapped = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
    assert ToolUse.of([wrapped]).told == ToolUse.of([{"name": "weather", "parameters": SCHEMA}]).told


def test_arguments_are_objects() -> None:
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
