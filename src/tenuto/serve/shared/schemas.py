"""Options of turns as the native interface has them, and logprobs as it shows them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, Field, create_model, model_validator

from tenuto.base.checks import Bounds
from tenuto.base.errors import InvalidRequest
from tenuto.base.options import MAX_STOP_IDS, OPTIONS, Policy, TurnOptions
from tenuto.base.sampling import MAX_BIASES, MAX_SEED, MAX_TOKEN_ID, TokenLogprob

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

MOST_FIELDS = 128
"""Of an object in a request."""
MOST_MESSAGES = 10_000
"""In one request, and parts of messages."""
MOST_PROMPTS = 1024
"""In one request."""

Items = Annotated[list[T], Field(fail_fast=True, max_length=2**20)]
"""A list of token ids, or whatever else takes little time to check. Of entries that are wrong the first is told: there
may be many."""
Messages = Annotated[list[T], Field(fail_fast=True, max_length=MOST_MESSAGES)]
Prompts = Annotated[list[T], Field(fail_fast=True, max_length=MOST_PROMPTS)]
"""Prompts, or what is said of each."""


def at_most(entries: int) -> BeforeValidator:
    """For a field that is an object: its size is looked at before its entries are."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > entries:
            raise ValueError(f"there are {len(given)} entries; allowed: at most {entries}")
        return given

    return BeforeValidator(check)


TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenKey = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=False)]
"""A token id as a key: JSON has only strings there."""

_TYPES: dict[str, Any] = {
    "logit_bias": Annotated[dict[TokenKey, float], at_most(MAX_BIASES)],
    "stop": str | Items[str],
    "stop_ids": Items[TokenId],
}
"""Of options that are not numbers or flags."""


class Object(BaseModel):
    """An object in a request."""

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        """Raises `InvalidRequest` before any field is looked at."""
        if isinstance(given, dict) and len(given) > MOST_FIELDS:
            raise InvalidRequest(f"an object has {len(given)} fields; allowed: at most {MOST_FIELDS}")
        return given


_OF_SESSIONS = {each.name: each for each in fields(Policy)}


def field_of(name: str, description: str | None = None) -> Any:
    """A field of a request that is the engine's option of this name, of a turn or else of a session, as far as its
    bounds go."""
    given = (OPTIONS.get(name) or _OF_SESSIONS[name]).metadata
    bounds: Bounds | None = given["bounds"]
    limits: dict[str, Any] = {}
    if bounds is not None:
        limits = {"gt" if bounds.above else "ge": bounds.low, "le": bounds.high}
    elif name == "stop_ids":
        limits = {"max_length": MAX_STOP_IDS}
    return Field(None, description=description or given["description"] or None, **limits)


def with_options(*names: str) -> Callable[[type[M]], type[M]]:
    """Gives a model of requests the engine's options with these names, or all: by their own bounds and descriptions,
    and `None` if they are not given. `options_of` reads them."""

    def add(model: type[M]) -> type[M]:
        chosen: dict[str, Any] = {name: (_type_of(name) | None, field_of(name)) for name in names or OPTIONS}
        return create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **chosen
        )

    return add


def _type_of(name: str) -> Any:
    if name in _TYPES:
        return _TYPES[name]
    bounds = OPTIONS[name].metadata["bounds"]
    return bool if bounds is None else type(bounds.low)


def options_of(request: BaseModel) -> TurnOptions:
    """The options that a request gives by the engine's names."""
    given = {name: getattr(request, name, None) for name in OPTIONS}
    return cast("TurnOptions", {name: value for name, value in given.items() if value is not None})


def random_seed() -> int:
    """For turns that draw and name no seed."""
    return secrets.randbelow(MAX_SEED + 1)


def logprob_body(entry: TokenLogprob) -> dict[str, Any]:
    """A token's log probability and the likeliest in its place."""
    return {
        "token": entry.token,
        "text": entry.raw.decode(errors="replace"),
        "logprob": entry.logprob,
        "top": [
            {"token": other.token, "text": other.raw.decode(errors="replace"), "logprob": other.logprob}
            for other in entry.top
        ],
    }
