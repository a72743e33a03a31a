"""Options under the names of each API, translated in both directions. The cases follow from the declarations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError, create_model

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import OF_SAMPLING, OPTIONS, TurnParams, turn_params
from tenuto.base.tools.definitions import ModelHabits
from tenuto.serve.anthropic.schemas import MessagesBody
from tenuto.serve.llama_cpp import schemas as llama_cpp
from tenuto.serve.native.schemas import NewAppend, NewCompaction, NewTurn
from tenuto.serve.ollama import schemas as ollama
from tenuto.serve.openai.response_schemas import CompactBody, ResponseBody
from tenuto.serve.openai.schemas import ChatBody, CompletionBody
from tenuto.serve.sglang.schemas import GenerateRequest, SamplingParams
from tenuto.serve.shared.schemas import Object, type_of
from tenuto.serve.shared.turn_request import TurnRequest, aliases_of

HI = [{"role": "user", "content": "hi"}]
LEAST: dict[type[TurnRequest], dict[str, Any]] = {
    ChatBody: {"model": "m", "messages": HI},
    CompactBody: {"input": "a"},
    CompletionBody: {"model": "m", "prompt": "a"},
    GenerateRequest: {"text": "a"},
    MessagesBody: {"model": "m", "messages": HI, "max_tokens": 9},
    NewAppend: {},
    NewCompaction: {},
    NewTurn: {},
    ResponseBody: {"model": "m", "input": "a"},
    SamplingParams: {},
    llama_cpp.CompletionBody: {"prompt": "a"},
    llama_cpp.InfillBody: {"input_prefix": "a", "input_suffix": "b"},
    ollama.Options: {},
}
"""The minimal fields of each request."""
INSIDE: dict[type[TurnRequest], str] = {SamplingParams: "sampling_params", ollama.Options: "options"}
"""The fields of other requests that have these."""
VALUES = (5, 0.5, True, False, ["end"], [7], {"7": 1.0}, {"regex": "a"}, "text")
"""Values to try."""


def requests(base: type[TurnRequest] = TurnRequest) -> Iterator[type[TurnRequest]]:
    """Returns the requests of all APIs that take options: classes that no other extends, and those in `LEAST`."""
    extending = base.__subclasses__()
    if base.setting and (not extending or base in LEAST):
        yield base
    for each in extending:
        yield from requests(each)


SETTINGS = [
    pytest.param(request, option, name, id=f"{request.__name__}-{option}-{name}")
    for request in LEAST
    for option, names in request.setting.items()
    for name in names
]


def value_of(option: str) -> tuple[Any, TurnParams]:
    """Returns a value that the option allows, not its default, and the parameters of a turn with it."""
    allowed: Any = create_model("Allowed", __base__=Object, value=(type_of(option), ...))
    for value in VALUES:
        try:
            given: Any = {option: allowed(value=value).value}
            params = turn_params(given)
        except (ValidationError, InvalidRequest):
            continue
        if params != TurnParams():
            return value, params
    raise AssertionError(f"no value for {option}")


def params_of(request: type[TurnRequest], fields: dict[str, Any]) -> tuple[TurnRequest, TurnParams]:
    """Returns the request with these fields and the parameters of its turn."""
    if request is SamplingParams:
        outer = GenerateRequest.model_validate({**LEAST[GenerateRequest], "sampling_params": fields})
        return outer, outer.items()[0].params
    if request is ollama.Options:
        chat = ollama.ChatBody.model_validate({"model": "m", "messages": HI, "options": fields})
        return chat, chat.params(ModelHabits())
    made = request.model_validate({**LEAST[request], **fields})
    if isinstance(made, GenerateRequest):
        return made, made.items()[0].params
    return made, made.params(ModelHabits())


def test_every_request_is_tested() -> None:
    assert set(requests()) == set(LEAST)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_declared_name_is_a_field_of_its_apis_requests(option: str) -> None:
    for api, names in OPTIONS[option].metadata["names"].items():
        of_api = [request for request in LEAST if api in request.apis]
        assert of_api, f"no request is of {api}"
        for request in of_api:
            nearest = aliases_of(option, request.apis)
            assert request.setting[option] == nearest
            assert set(nearest) <= set(request.model_fields)
            assert option in nearest or option not in request.model_fields
            assert names == nearest or request.apis[0] != api


@pytest.mark.parametrize(("request_type", "option", "name"), SETTINGS)
def test_an_option_is_accepted_under_its_apis_name_and_reaches_the_turn_under_ours(
    request_type: type[TurnRequest], option: str, name: str
) -> None:
    value, expected = value_of(option)
    request, params = params_of(request_type, {name: value})

    def got(of: TurnParams) -> Any:
        return getattr(of.sampling if option in OF_SAMPLING else of, option)

    assert got(params) == got(expected) != got(TurnParams())
    assert request.field(option) == (f"{INSIDE[request_type]}.{name}" if request_type in INSIDE else name)


def test_of_two_names_for_one_option_the_more_specific_counts() -> None:
    both = {"max_tokens": 5, "max_completion_tokens": 6}
    request, params = params_of(ChatBody, both)
    assert (params.max_new_tokens, request.field("max_new_tokens")) == (6, "max_completion_tokens")
    assert params_of(ChatBody, {"max_tokens": 5})[0].field("max_new_tokens") == "max_tokens"


@pytest.mark.parametrize("request_type", [request for request in LEAST if request.usual["temperature"]])
def test_a_sampling_turn_without_a_seed_gets_a_random_one(request_type: type[TurnRequest]) -> None:
    seeds = {params_of(request_type, {})[1].sampling.seed for _ in range(3)}
    assert len(seeds) == 3
    if "temperature" in request_type.setting:
        assert params_of(request_type, {"temperature": 0.0})[1].sampling.seed == 0
