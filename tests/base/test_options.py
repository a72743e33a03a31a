"""Options from callers: each sets its own field, and wrong values are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import MAX_BAD_WORDS, OPTIONS, TurnOptions, TurnParams, turn_params
from tenuto.base.sampling import MAX_BIASES, MAX_LISTED, Sampling
from tenuto.base.tools.grammar import Grammar

FULL: TurnOptions = {
    "max_new_tokens": 9,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.5,
    "seed": 3,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -1,
    "frequency_penalty": 2,
    "logit_bias": {7: -100, 8: 1.5},
    "stop": "end",
    "stop_regex": ["e+nd"],
    "include_stop": True,
    "stop_ids": [4],
    "ignore_eos": True,
    "priority": 1,
    "queue_timeout": 2.0,
    "timeout": 3.0,
    "expect_within": 4.0,
    "min_new_tokens": 9,
    "logprobs": 20,
    "input_logprobs": 0,
    "logprob_ids": [5, 2],
    "prediction": "as before",
    "speculate": False,
    "bad_words": ["x"],
}


def test_every_option_sets_its_own_field() -> None:
    assert FULL.keys() | {"grammar", "allowed_ids"} == TurnOptions.__annotations__.keys() == OPTIONS.keys()
    assert turn_params(FULL) == TurnParams(
        max_new_tokens=9,
        sampling=Sampling(0.5, 4, 0.5, 3, 0.25, 1.5, -1, 2, ((7, -100), (8, 1.5))),
        stop_ids=(4,),
        stop=("end",),
        stop_regex=("e+nd",),
        include_stop=True,
        ignore_eos=True,
        priority=1,
        queue_timeout=2.0,
        timeout=3.0,
        expect_within=4.0,
        min_new_tokens=9,
        logprobs=20,
        input_logprobs=0,
        logprob_ids=(5, 2),
        prediction="as before",
        speculate=False,
        bad_words=("x",),
    )
    assert turn_params({"allowed_ids": [9, 4]}).sampling.allowed_ids == (9, 4)
    assert turn_params({}) == TurnParams()
    assert turn_params({"grammar": {"regex": "[0-9]+"}}) == TurnParams(grammar=Grammar("regex", "[0-9]+"))


def test_stop_ids_and_min_new_tokens_cannot_be_combined_with_a_grammar() -> None:
    with pytest.raises(InvalidRequest, match="stop id"):
        turn_params({"grammar": {"regex": "[0-9]+"}, "stop_ids": [7], "min_new_tokens": 1})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"allowed_ids": [1], "min_new_tokens": 1}, "min_new_tokens"),
        ({"allowed_ids": [1], "grammar": {"regex": "a"}}, "grammar"),
        ({"allowed_ids": list(range(MAX_LISTED + 1))}, "at most 1024"),
        ({"logprob_ids": [-1]}, "from 0"),
        ({"bad_words": ["a"], "allowed_ids": [1]}, "bad_words"),
        ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, "at most 1024"),
        ({"bad_words": "a"}, "list of strings"),
        ({"bad_words": ["a", ""]}, "of 1 to 128"),
        ({"bad_words": ["a" * 129]}, "of 1 to 128"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
    ],
)
def test_lists_have_conditions(options: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        turn_params(options)
    assert refused.value.param in options


def test_a_logit_bias_is_accepted_as_pairs_of_any_kind() -> None:
    expected = ((7, -100), (8, 1.5))
    for pairs in ([(7, -100), (8, 1.5)], [[7, -100], [8, 1.5]], iter([(7, -100), (8, 1.5)])):
        assert turn_params({"logit_bias": pairs}).sampling.logit_bias == expected  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("nan")},
        {"repetition_penalty": 101},
        {"presence_penalty": 2.1},
        {"frequency_penalty": "1"},
        {"logit_bias": 5},
        {"logit_bias": "7"},
        {"logit_bias": [7]},
        {"logit_bias": [(7,)]},
        {"logit_bias": [(7, 1, 1)]},
        {"logit_bias": [(7, 1), (7, 2)]},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {"7": 1}},
        {"logit_bias": {7: 100.5}},
        {"logit_bias": {7: float("inf")}},
        {"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1)},
        {"min_new_tokens": -1},
        {"min_new_tokens": None},
        {"min_new_tokens": 3, "max_new_tokens": 2},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": True},
        {"input_logprobs": 21},
        {"no_such_option": 1},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="allowed"):
        turn_params(options)  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [[(7, 1.0)], {7: 1.0}, None])
def test_sampling_requires_its_biases_as_a_tuple(bias: object) -> None:
    with pytest.raises(InvalidRequest, match="allowed: a tuple of pairs"):
        Sampling(logit_bias=bias)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}], ids=str
)
def test_sampling_is_penalised_if_a_logit_depends_on_earlier_tokens(penalty: dict[str, Any]) -> None:
    assert Sampling(**penalty).penalised
    assert not Sampling(0.5, 4, 0.5, min_p=0.1, logit_bias=((7, 1.0),)).penalised
