"""Grammars of every kind, compiled for a tokenizer: the allowed tokens, the refused grammars, and the cache."""

from __future__ import annotations

import json
from functools import cache
from itertools import islice
from random import Random

import numpy as np
import pytest
import tokenizers
from llguidance import LLParserLimits
from tokenizers import decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

import tenuto
from tenuto.base.errors import InvalidRequest
from tenuto.base.plan import Words
from tenuto.base.tools.grammar import MAX_GRAMMAR, Grammar
from tenuto.text import compiled, grammars
from tenuto.text.compiled import (
    GROWTH_BYTES_A_SECOND,
    LEAST_BYTES,
    MAX_BYTES,
    MAX_GROWTH,
    CompiledGrammars,
    Growth,
)
from tenuto.text.constraint import Constraint
from tenuto.text.grammars import MAX_TOKEN_BYTES, GrammarCompiler
from tenuto.text.tokenizer import Tokenizer
from tenuto.text.words import witness_tokenizer
from tests.engine import schemas

SIZE = 700
END = SIZE - 1
TOKENS = witness_tokenizer(SIZE)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENS, SIZE, (END,))


def spelling(*words: str) -> Tokenizer:
    """Returns a tokenizer of the 256 bytes, these words, to which it encodes no text, and an end token."""
    split = ByteLevel(add_prefix_space=False, use_regex=False)
    texts = [*sorted(ByteLevel.alphabet()), *(split.pre_tokenize_str(word)[0][0] for word in words if len(word) > 1)]
    backend = tokenizers.Tokenizer(BPE({text: number for number, text in enumerate(dict.fromkeys(texts))}, []))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    return Tokenizer(backend, eos_ids=(len(set(texts)),))


def allowed(constraint: Constraint) -> set[int]:
    masks = constraint.masks(())
    assert masks is not None
    return set(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), count=SIZE, bitorder="little")).tolist())


def follows(grammar: Grammar, text: str) -> bool:
    """Returns whether `text` belongs to the grammar, token by token."""
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
def test_only_texts_of_the_grammar_may_be_generated(grammar: Grammar, right: str, wrong: str) -> None:
    assert follows(grammar, right)
    assert not follows(grammar, wrong)


SAID = '{"name": "read", "arguments": {"path": "a"}}'


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.of_choice([SAID]), SAID),
        (Grammar.of_choice([SAID, SAID + "."]), SAID),
        (Grammar("ebnf", f"root ::= {json.dumps(SAID)} [a-z]*"), SAID),
        (Grammar("lark", f"start: {json.dumps(SAID[:30])} %json {{}} /}}/"), SAID),
        (Grammar.of_schema({"const": json.loads(SAID)}), SAID),
        (Grammar("json_object"), SAID),
    ],
    ids=str,
)
def test_a_mask_allows_every_token_with_which_the_text_can_go_on(grammar: Grammar, text: str) -> None:
    rng = Random(1)
    cuts = [sorted(rng.sample(range(len(text) + 1), 2)) for _ in range(60)]
    tokens = spelling(text, *(text[start:stop] for start, stop in cuts))
    end = tokens.eos_ids[0]
    compiler = GrammarCompiler(tokens, end + 1, (end,))
    for _ in range(5):
        constraint, left = compiler.constraint(grammar), text
        while left:
            following = [i for i in range(end) if (raw := tokens.token_bytes(i)) and left.encode().startswith(raw)]
            masks = constraint.masks(())
            assert masks is not None
            assert all(masks[0][token // 32] >> token % 32 & 1 for token in following)
            token = rng.choice(following)
            constraint.push(token)
            left = left[len(tokens.token_bytes(token)) :]


def test_tokens_too_long_for_the_library_are_never_allowed() -> None:
    tokens = spelling("a" * MAX_TOKEN_BYTES, "a" * (MAX_TOKEN_BYTES + 1))
    end = tokens.eos_ids[0]
    masks = GrammarCompiler(tokens, end + 1, (end,)).constraint(Grammar("regex", "a*b")).masks(())
    assert masks is not None
    found = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist()
    assert {len(tokens.token_bytes(token)) for token in found} == {1, MAX_TOKEN_BYTES}


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
def test_malformed_grammars_are_refused(grammar: Grammar, problem: str) -> None:
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
def test_values_that_cannot_be_a_grammar_are_refused_before_compiling(given: object) -> None:
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


def test_every_constraint_starts_at_the_beginning_of_its_grammar() -> None:
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
def test_guesses_at_and_after_the_end_of_a_text_leave_no_trace(guessed: str, end: bool) -> None:
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


def test_compiled_grammars_are_evicted_by_memory_least_recently_used_first() -> None:
    kept = CompiledGrammars[int]()
    grammars = [Grammar("regex", f"a{{{n}}}") for n in range(MAX_BYTES // LEAST_BYTES)]  # one too many
    growths = [Growth() for _ in grammars]
    for number, grammar in enumerate(grammars[:-1]):
        kept.keep(grammar, number, growths[number])
    assert kept.find(grammars[0]) == 0
    kept.keep(grammars[-1], -1, growths[-1])
    assert [grammars[n] in kept for n in (0, 1, 2, -1)] == [True, False, True, True]
    growths[5].add(2.2 * LEAST_BYTES / GROWTH_BYTES_A_SECOND)
    kept.trim()
    assert [grammars[n] in kept for n in (0, 2, 3, 4, 5)] == [True, False, False, True, True]


def test_a_slowly_compiled_grammar_may_grow_more_but_not_without_bound() -> None:
    told: list[str] = []
    quick, slow = Growth(0.0, lambda: told.append("quick")), Growth(3600.0, lambda: told.append("slow"))
    for growth in (quick, slow):
        growth.add(1.5 * MAX_GROWTH / GROWTH_BYTES_A_SECOND)
    assert (quick.outgrown, slow.outgrown, told) == (True, False, ["quick"])
    slow.add(MAX_BYTES / GROWTH_BYTES_A_SECOND)
    slow.add(1.0)
    assert (slow.outgrown, told) == (True, ["quick", "slow"])


def test_a_turn_leaves_later_turns_enough_of_the_automaton_of_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "LIMITS", LLParserLimits(max_lexer_states=2000, verbose_errors=False))
    monkeypatch.setattr(compiled, "GROWTH_BYTES_A_SECOND", 1e15)  # any mask counts as too much growth
    own, rng = GrammarCompiler(TOKENS, SIZE, (END,)), Random(1)
    grammar = Grammar("regex", "[a-z ]*(a|b)[a-z ]{200}")

    def followed() -> int:
        """Returns the number of tokens until the grammar is too complex."""
        constraint = own.constraint(grammar)
        for tokens in range(2000):
            if constraint.masks(()) is None:
                return tokens
            constraint.push(rng.choice(TOKENS.encode("abxy ")))
        raise AssertionError("it never became too complex")

    first = followed()
    assert first > 20
    assert followed() > first / 2


def test_answers_in_random_schemas_parse_and_validate() -> None:
    with tenuto.Engine("witness", context_length=4096, max_running=16) as engine:
        assert schemas.check(engine, list(islice(schemas.schemas(1), 48))) > 500
        engine.audit()


def test_without_any_allowed_token_there_is_no_mask_and_the_next_token_fails() -> None:
    class Nowhere:
        failure = ""
        complete = False

        def consume(self, token: int) -> bool:
            return True

        def fill(self, words: Words) -> None:
            words[:] = 0

        def copy(self) -> Nowhere:
            return self

    constraint = Constraint(Nowhere(), 2)
    assert constraint.masks(()) is None
    assert not constraint.push(1)
    assert constraint.failure


def test_a_text_may_end_early_only_with_control_tokens_that_its_grammar_names() -> None:
    constraint = compiler().constraint(Grammar("lark", f"start: /[ab]+/ <[{END - 1}]>"))
    constraint.push(TOKENS.encode("a")[0])
    assert {END - 1, END} & allowed(constraint) == {END - 1}
