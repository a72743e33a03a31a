"""Options of turns as the native interface has them, and logprobs as it shows them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tenuto.base.messages import LogprobView

TokenKey = Annotated[int, Field(strict=False)]
"""A token id as a key: JSON has only strings there."""


class TurnOptions(BaseModel):
    """How a turn generates. What is not given is as the engine has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_new_tokens: int | None = Field(None, ge=0, le=2**40, description="As many as fit if not given.")
    min_new_tokens: int | None = Field(None, ge=0, le=2**40, description="Before so many, nothing ends the turn.")
    temperature: float | None = Field(None, ge=0, le=1e6, description="0, the default, is greedy.")
    top_k: int | None = Field(None, ge=0, lt=2**31)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenKey, float] | None = Field(None, max_length=1024, description="By token id.")
    seed: int | None = Field(None, ge=0, lt=2**63, description="Made up by the server if not given.")
    stop: str | list[str] | None = Field(None, description="Strings that end the turn.")
    stop_ids: list[int] | None = Field(None, max_length=64, description="Token ids that do.")
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
