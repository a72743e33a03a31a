"""Building blocks of requests in all interfaces: bounded objects and lists, engine options as fields, ids."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, TypeVar

from fastapi import Header
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tenuto.base.checks import Bounds
from tenuto.base.errors import InvalidRequest
from tenuto.base.options import MAX_BAD_WORDS, MAX_STOP_IDS, OPTIONS, Policy
from tenuto.base.sampling import MAX_BIASES, MAX_LISTED, MAX_TOKEN_ID

T = TypeVar("T")

ID_PATTERN = r"^(\.{0,2}[A-Za-z0-9_:-]|\.{3})[A-Za-z0-9._:-]*$"
"""Pattern of a session's id, which needs no quoting in a URL. Excludes `.` and `..`, which clients remove from URLs."""
ID_LENGTH = 64
UNSUPPORTED = "unsupported"
"""Pydantic's type of the errors that `unsupported` makes."""
REQUIRED = "required"
"""Pydantic's type of the errors that `required` makes."""
MAX_FIELDS = 128
"""Maximum number of fields of an object in a request."""
MAX_MESSAGES = 10_000
"""Maximum number of messages, and of parts of their content, in one request."""
MAX_PROMPTS = 1024
"""Maximum number of prompts in one request."""

Items = Annotated[list[T], Field(fail_fast=True, max_length=2**20)]
"""A list of token ids, or of anything else that is quick to check. Only the first wrong entry is reported."""
Messages = Annotated[list[T], Field(fail_fast=True, max_length=MAX_MESSAGES)]
Prompts = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS)]
"""Prompts, or one value per prompt."""


def at_most(entries: int) -> BeforeValidator:
    """Returns a validator that bounds the size of an object before its entries are validated."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > entries:
            raise ValueError(f"there are {len(given)} entries; allowed: at most {entries}")
        return given

    return BeforeValidator(check)


Id = Annotated[str, Field(pattern=ID_PATTERN, max_length=ID_LENGTH)]
"""Id of a session."""
ModelName = Annotated[str | None, Field(description="If given, a name listed by `/v1/models`, or `default`.")]
"""The model of a request: the served one by any of its names, or an adapter."""
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenKey = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=False)]
"""A token id as an object's key, where JSON allows only strings."""

_TYPES: dict[str, Any] = {
    "allowed_ids": Items[TokenId],
    "bad_words": Items[str],
    "grammar": Annotated[dict[str, Any], at_most(1)],
    "logit_bias": Annotated[dict[TokenKey, float], at_most(MAX_BIASES)],
    "logprob_ids": Items[TokenId],
    "prediction": str,
    "stop": str | Items[str],
    "stop_ids": Items[TokenId],
    "stop_regex": str | Items[str],
}
"""The types of options that are not numbers or flags."""
_MOST = {"stop_ids": MAX_STOP_IDS, "allowed_ids": MAX_LISTED, "logprob_ids": MAX_LISTED, "bad_words": MAX_BAD_WORDS}
"""The most entries of options that are lists."""


class Object(BaseModel):
    """An object in a request: unknown fields, wrong types and too many fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        """Raises `InvalidRequest` if there are too many fields, before any is validated."""
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise InvalidRequest(f"an object has {len(given)} fields; allowed: at most {MAX_FIELDS}")
        return given


_OF_SESSIONS = {each.name: each for each in fields(Policy)}


def field_of(name: str, description: str | None = None, *, default: Any = None, **own: Any) -> Any:
    """Returns a request field with the bounds and description of the engine's option of this name, for turns or
    sessions. `own`: bounds that replace the option's."""
    given = (OPTIONS.get(name) or _OF_SESSIONS[name]).metadata
    bounds: Bounds | None = given["allowed"]
    limits: dict[str, Any] = {}
    if bounds is not None:
        limits = {"gt" if bounds.above else "ge": bounds.low, "le": bounds.high}
    elif name in _MOST:
        limits = {"max_length": _MOST[name]}
    return Field(default, description=description or given["description"] or None, **{**limits, **own})


def type_of(name: str) -> Any:
    """Returns the type of a request field for the engine's option of this name."""
    if name in _TYPES:
        return _TYPES[name]
    bounds = OPTIONS[name].metadata["allowed"]
    return bool if bounds is None else type(bounds.low)


def unsupported(field: str, problem: str) -> PydanticCustomError:
    """Returns an error for validators to raise: `field` (empty: the one being validated) is known but not supported."""
    return PydanticCustomError(UNSUPPORTED, "{field} {problem}", {"field": field, "problem": problem})


def required(field: str) -> PydanticCustomError:
    """Returns an error for validators to raise: `field` must be given here."""
    return PydanticCustomError(REQUIRED, "{field} is required", {"field": field})


IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        description="While the first request with this key runs, repetitions attach to its turn. Once it has committed,"
        " they get its result, also from the next server with the same journal. A session keeps its last 32, of 1 MiB"
        " together. A turn with a larger result is not run again, but a repeated request may be refused with"
        " 410. After an abort the key is free. A different body with the same key is refused with 422.",
    ),
]


class Error(BaseModel):
    """The error of a refused request. Its message names the problem and the allowed values."""

    error: dict[str, Any]


_AS_ERROR = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    # FastAPI makes a validator for every `model` of every route, so only one status has one.
    status: {"description": text} | ({"model": Error} if status == 400 else _AS_ERROR)
    for status, text in {
        400: "Malformed, or too long for the context",
        401: "No valid key",
        403: "This needs an admin key",
        404: "No such session or turn",
        409: "Busy, already in use, or not possible in this state",
        410: "The session is closing",
        412: "The session has another version",
        408: "The body did not arrive in time",
        413: "The body is too large",
        415: "The body is not declared as JSON",
        422: "The idempotency key was used with another body",
        429: "A limit is reached; see `Retry-After`",
        431: "The headers are too large, or too many",
        500: "The server failed",
        504: "The turn waited for its session until its deadline",
        503: "The engine has stopped, or the server is shutting down; see `Retry-After`",
        507: "The server's disk has no room for the file",
    }.items()
}
