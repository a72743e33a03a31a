"""Options of turns as the native interface has them, and logprobs as it shows them."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tenuto.base.errors import InvalidRequest
from tenuto.base.messages import LogprobView

T = TypeVar("T")

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


TokenKey = Annotated[int, Field(strict=False)]
"""A token id as a key: JSON has only strings there."""

LogitBias = Annotated[dict[TokenKey, float], at_most(1024)]


class Object(BaseModel):
    """An object in a request."""

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        """Raises `InvalidRequest` before any field is looked at."""
        if isinstance(given, dict) and len(given) > MOST_FIELDS:
            raise InvalidRequest(f"an object has {len(given)} fields; allowed: at most {MOST_FIELDS}")
        return given


class TurnOptions(Object):
    """How a turn generates. What is not given is as the engine has it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    max_new_tokens: int | None = Field(None, ge=0, le=2**40, description="As many as fit if not given.")
    min_new_tokens: int | None = Field(None, ge=0, le=2**40, description="Before so many, nothing ends the turn.")
    temperature: float | None = Field(None, ge=0, le=1e6, description="0, the default, is greedy.")
    top_k: int | None = Field(None, ge=0, lt=2**31)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = Field(None, description="By token id.")
    seed: int | None = Field(None, ge=0, lt=2**63, description="Made up by the server if not given.")
    stop: str | Items[str] | None = Field(None, description="Strings that end the turn.")
    stop_ids: Items[int] | None = Field(None, max_length=64, description="Token ids that do.")
    ignore_eos: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20, description="Of output tokens, with so many of the likeliest.")
    input_logprobs: int | None = Field(None, ge=0, le=20, description="The same of the input.")
    priority: int | None = Field(None, ge=-1000, le=1000)
    queue_timeout: float | None = Field(None, gt=0, le=1e9, description="Seconds until it must have begun.")
    timeout: float | None = Field(None, gt=0, le=1e9, description="Seconds until it must have ended.")

    def engine_options(self) -> dict[str, Any]:
        """What was given, by the engine's names."""
        return self.model_dump(include=set(TurnOptions.model_fields), exclude_none=True)


def logprob_body(entry: LogprobView) -> dict[str, Any]:
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
