"""Grammars of every kind, compiled for a tokenizer: what may come next, what is refused, and what is kept."""

from __future__ import annotations

import json
from functools import cache
from itertools import islice

import numpy as np
import pytest

import tenuto
from tenuto.base.errors import InvalidRequest
from tenuto.base.grammar import MAX_GRAMMAR, Grammar
from tenuto.text.constraint import Constraint
from tenuto.text.grammars import MAX_CACHED, GrammarCompiler
from tenuto.text.words import witness_tokenizer
from tests.engine import schemas

SIZE = 700
END = SIZE - 1
TOKENS = witness_tokenizer(SIZE)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENS, SIZE, (END,))


def allowed(constraint: Constraint) -> set[int]:
    masks = constraint.masks(())
    assert masks is not None
    return set(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), count=SIZE, bitorder="little")).tolist())


def follows(grammar: Grammar, text: str) -> bool:
    """Whether `text` is a text of the grammar, token by token."""
    constraint = compiler().constraint(grammar)
    tokens = TOKENS.encode(text)
    for n, token in enumerate(tokens, 1):
        if token not in allowed(constraint):
            return False
        if constraint.push(token):
            return n == len(tokens)
    return END in allowed(constraint)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar.of_schema(PERSON), '{"name": "é😀", "age": 3}', '{"name": "x"}'),
        (Grammar.of_schema(PERSON), '{\n  "name": "x",\n  "age": 30\n}', '{"name": "x", "age": "3"}'),
        (Grammar.of_schema(json.dumps(PERSON)), '{"name":"","age":-1}', '{"age":1,"name":""}'),
        (Grammar.of_schema(True), "[1, {}]", "[1"),
        (Grammar("json_object"), '{"a": [null, {"b": 1.5e3}]}', "[1]"),
        (Grammar("regex", "[0-9]{3}(-[a-z]+)?"), "123-abc", "12"),
        (Grammar.of_choice(["red", "green/", 'q"\\\n😀']), 'q"\\\n😀', "red "),
        (Grammar.of_choice(["red", "reddish"]), "red", "redd"),
        (Grammar("ebnf", 'root ::= "a" digits "b"\ndigits ::= [0-9]+'), "a12b", "ab"),
        (Grammar("lark", 'start: "x" NUMBER\nNUMBER: /[0-9]+/'), "x07", "x"),
    ],
    ids=str,
)
def test_a_text_of_the_grammar_may_be_said_and_no_other(grammar: Grammar, right: str, wrong: str) -> None:
    assert follows(grammar, right)
    assert not follows(grammar, wrong)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar("regex", "["), "regular expression is refused"),
        (Grammar("regex", "(?=x)"), "look-around"),
        (Grammar.of_schema({"type": "nonsense"}), "nonsense"),
        (Grammar.of_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("json_schema", "[]"), "not an object"),
        (Grammar("ebnf", "root = x"), "EBNF"),
        (Grammar("ebnf", 'root ::= "a" missing'), "EBNF"),
        (Grammar("lark", "start: missing"), "missing"),
        (Grammar("lark", 'start: <|im_end|> "x"'), "Lark grammar is refused"),
        (Grammar("lark", 'start: ""'), "empty"),
        (Grammar("choice", "7"), "choice is 7"),
    ],
    ids=str,
)
def test_what_is_no_grammar_is_refused(grammar: Grammar, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        compiler().constraint(grammar)
    assert refused.value.param == "grammar"
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"regex": "a", "choice": ["a"]},
        {"nope": "a"},
        {"regex": 7},
        {"regex": ""},
        {"regex": "\ud800"},
        {"regex": "a" * (MAX_GRAMMAR + 1)},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": "abc"},
        {"json_object": False},
        {"json_schema": 7},
        {"json_schema": {"x": float("nan")}},
        "a",
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_cannot_be_a_grammar_is_refused_before_it_is_compiled(given: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Grammar.of(given)
    assert refused.value.param == "grammar"


@pytest.mark.parametrize(
    "given", [{"regex": "a"}, {"choice": ["a", "b"]}, {"json_object": True}, {"ebnf": "a"}, {"lark": "a"}], ids=str
)
def test_a_grammar_is_written_as_it_was_given(given: dict[str, object]) -> None:
    assert Grammar.of(given).given() == given


def test_control_tokens_come_only_at_the_end() -> None:
    constraint = compiler().constraint(Grammar("regex", "(.|\n)*"))
    assert {END - 1, END} & allowed(constraint) == {END}
    constraint = compiler().constraint(Grammar("regex", "a(.|\n)*"))
    assert END not in allowed(constraint)


def test_every_constraint_begins_at_the_beginning() -> None:
    grammar = Grammar("regex", "[0-9]{2}")
    first = compiler().constraint(grammar)
    before = allowed(first)
    first.push(TOKENS.encode("7")[0])
    assert compiler().has(grammar)
    assert allowed(compiler().constraint(grammar)) == before


def test_masks_after_guesses_are_those_after_the_same_tokens() -> None:
    grammar, guesses = Grammar("regex", "[a-c]{2}[0-9]{3}x*"), TOKENS.encode("ab12")
    guessing = compiler().constraint(grammar)
    masks = guessing.masks(guesses)
    assert masks is not None
    pushed = compiler().constraint(grammar)
    for n, token in enumerate(guesses):
        assert (masks[n] == pushed.masks(())).all()
        pushed.push(token)
    assert (masks[4] == pushed.masks(())).all()
    assert guessing.push(guesses[0]) is False  # the guesses have left no trace
    wrong = guessing.masks(TOKENS.encode("c9zz"))
    assert wrong is not None
    assert (wrong[1] == pushed_after("ac", grammar)).all()
    assert (wrong[3:] == 0xFFFFFFFF).all()


@pytest.mark.parametrize("guessed", ["7x1", "77", "7"])
@pytest.mark.parametrize("end", [False, True])
def test_guesses_at_the_end_of_a_text_and_behind_it_leave_no_trace(guessed: str, end: bool) -> None:
    constraint = compiler().constraint(Grammar("regex", "a+7"))
    for _ in range(3):
        assert not constraint.push(TOKENS.encode("a")[0])
        masks = constraint.masks(TOKENS.encode(guessed) + [END] * end)
        assert masks is not None
        assert (masks[0] == pushed_after("a", Grammar("regex", "a+7"))).all()
        assert (masks[1:] == 0xFFFFFFFF).all()
    assert constraint.push(TOKENS.encode("7")[0])


def pushed_after(text: str, grammar: Grammar) -> np.ndarray:
    constraint = compiler().constraint(grammar)
    for token in TOKENS.encode(text):
        constraint.push(token)
    masks = constraint.masks(())
    assert masks is not None
    return masks[0]


def test_a_model_without_end_tokens_has_grammars_too() -> None:
    constraint = GrammarCompiler(TOKENS, SIZE, ()).constraint(Grammar("regex", "ab?"))
    assert constraint.push(TOKENS.encode("a")[0]) is False
    assert constraint.push(TOKENS.encode("b")[0]) is True


def test_grammars_are_kept_up_to_a_bound() -> None:
    own = GrammarCompiler(TOKENS, SIZE, (END,))
    grammars = [Grammar("regex", f"a{{{n}}}") for n in range(1, MAX_CACHED + 3)]
    for grammar in grammars:
        own.constraint(grammar)
    assert [own.has(grammar) for grammar in (grammars[0], grammars[1], grammars[2], grammars[-1])] == [
        False,
        False,
        True,
        True,
    ]


def test_answers_in_random_schemas_parse_and_validate() -> None:
    with tenuto.Engine("witness", context_length=4096, max_running=16) as engine:
        assert schemas.check(engine, list(islice(schemas.schemas(1), 48))) > 500
        engine.audit()
