"""Grammars of calls: every text they allow is read as the same calls, however it is cut."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.tools.answers import AnswerReader
from tenuto.base.tools.call_grammars import calls_grammar, shape_of
from tenuto.base.tools.definitions import CHANNELS, MARKS, THOUGHTS, ModelHabits, ToolFormat
from tenuto.base.tools.definitions import TAGS as TAGGED_BY
from tenuto.base.tools.grammar import Grammar
from tenuto.base.tools.tool_use import ToolUse
from tenuto.text.grammars import GrammarCompiler
from tenuto.text.tokenizer import Tokenizer
from tests.base.tools.calls import (
    CALLED,
    FUNCTION_TAGS,
    FUNCTIONS,
    IN_TAGS,
    JSON,
    LLAMA,
    NO_ARGUMENTS,
    ROME,
    SCHEMA,
    STOP,
    TAGS,
    parts_of,
    read,
)
from tests.text.test_grammars import follows


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
    assert parts_of(read(habits, [once]))[2] == [CALLED]
    assert follows(grammar, twice) is parallel
    assert parts_of(read(habits, [twice]))[2] == [CALLED, ("stop", {})]
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
    return ModelHabits(tools, marks=tuple((text, MARKED.control_ids[text]) for text in texts), **more)


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
        reader, whole = use.reading(habits, grammar).reader("a"), AnswerPart()
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
        assert parts_of(AnswerPart(whole.text + rest.text, whole.reasoning, whole.calls + rest.calls)) == expected


def test_a_grammar_without_room_for_reasoning_yields_none() -> None:
    habits = ModelHabits("tags", thinks="opened")
    grammar = Grammar("regex", "[0-9]+")
    assert shape_of(habits, grammar, {}, forced=False, parallel=False) == grammar
    assert ToolUse().reading(habits, grammar).reader().push("12").text == "12"
    assert ToolUse().reading(habits, None).reader().push("hm").reasoning == "hm"


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
