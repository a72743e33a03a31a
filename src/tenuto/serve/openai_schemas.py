"""What requests in OpenAI's manner may say, with the options that clients of vLLM and SGLang add to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from tenuto.base.checks import shown
from tenuto.base.errors import InvalidRequest, Unsupported
from tenuto.serve.edge import random_seed
from tenuto.serve.invalid import unsupported
from tenuto.serve.native_schemas import ID_LENGTH, ID_PATTERN
from tenuto.serve.options import MOST_MESSAGES, Items, LogitBias, Messages, Object, Prompts
from tenuto.serve.samples import MOST_SAMPLES

TokenId = Annotated[int, Field(ge=0, lt=2**31)]

_NONE: tuple[Any, ...] = (None, False, [], {})
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
"""Fields that change no answer here, whatever they say."""
NOT_THERE: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "audio": _NONE,
    "continue_final_message": _NONE,
    "function_call": (None, "none"),
    "functions": _NONE,
    "include_stop_str_in_output": _NONE,
    "modalities": (None, ["text"]),
    "moderation": _NONE,
    "prediction": _NONE,
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "store": _NONE,
    "suffix": (None,),
    "tool_choice": (None, "none"),
    "tools": _NONE,
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""Fields that are known and not there, with the values that do not ask for anything."""


ROLES = ("system", "developer", "user", "assistant")
"""Of messages; the first two are one."""


class Body(Object):
    """An object of a request. Values of another type are refused, and fields by their name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    not_there: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, harmless in cls.not_there.items():
            if name in given and not any(given[name] == value for value in harmless):
                raise unsupported(name, f"is {shown(given[name])}; it is not supported, allowed: to leave it out")
        return {name: value for name, value in given.items() if name not in cls.ignored and name not in cls.not_there}


class StreamOptions(Body):
    """How a stream is written."""

    not_there = dict.fromkeys(("continuous_usage_stats",), _NONE)
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(None, description="One more chunk at the end, with the usage of all choices.")


class Generation(Body):
    """What both kinds of completion take. Fields from `priority` on are not OpenAI's."""

    ignored = IGNORED
    not_there = NOT_THERE

    model: str = Field(description="As `/v1/models` has it.")
    n: int | None = Field(None, ge=1, le=MOST_SAMPLES, description="Answers to a prompt, which is computed once.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=1e6, description="1 if not given.")
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = Field(None, description="By token id.")
    seed: int | None = Field(None, description="Made up by the server if not given.")
    stop: str | Items[str] | None = Field(None, description="Strings that end the answer.")
    priority: int | None = Field(None, ge=-1000, le=1000, description="Higher runs first.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="-1 and 0 keep all.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, le=2**40)
    stop_token_ids: Items[TokenId] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    queue_timeout: float | None = Field(None, gt=0, le=1e9, description="Seconds until it must have begun.")
    timeout: float | None = Field(None, gt=0, le=1e9, description="Seconds until it must have ended.")
    session_id: str | None = Field(
        None,
        pattern=ID_PATTERN,
        max_length=ID_LENGTH,
        description="The request is a turn of this session, which is opened if there is none: only what is new is sent."
        " The answer has the session's `version`.",
    )

    text_field: ClassVar[str]
    """What the text to go on from is called."""

    @property
    def samples(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Raises `InvalidRequest` for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            said = "stream_options without stream; allowed: only with stream true"
            raise InvalidRequest(said, param="stream_options")
        if self.session_id is not None and self.samples > 1:
            raise InvalidRequest(f"n is {self.n}; allowed with session_id: 1, or fork the session", param="n")

    def param(self, option: str | None) -> str | None:
        """The field that an option of the engine's comes from."""
        return {**_FIELDS, "input": self.text_field}.get(option or "", option)

    def engine_options(self) -> dict[str, Any]:
        """What was given, by the engine's names; what was not is as OpenAI has it."""
        given = self.model_dump(include=_SAME, exclude_none=True)
        renamed = {"min_new_tokens": self.min_tokens, "stop_ids": self.stop_token_ids, "top_k": self.top_k}
        given |= {name: value for name, value in renamed.items() if value is not None}
        given["top_k"] = max(0, given.get("top_k", 0))
        temperature = given.setdefault("temperature", 1.0)
        if self.seed is not None:
            given["seed"] = self.seed % 2**63
        elif temperature > 0:
            given["seed"] = random_seed()
        return given


_FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_ids": "stop_token_ids"}
"""Fields by the engine's name of the option, where they differ."""
_SAME = {
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "presence_penalty",
    "priority",
    "queue_timeout",
    "repetition_penalty",
    "stop",
    "temperature",
    "timeout",
    "top_p",
}
"""Options whose name here is the engine's."""


class CompletionBody(Generation):
    """A text to be continued."""

    text_field = "prompt"
    prompt: str | Items[TokenId] | Prompts[str] | Prompts[Items[TokenId]] = Field(
        description="Text or token ids, or a list of such.", examples=["Once upon a time"]
    )
    max_tokens: int | None = Field(None, ge=0, le=2**40, description="16 if not given.")
    logprobs: int | None = Field(None, ge=0, le=5, description="Of every token, with so many of the likeliest.")
    echo: bool | None = Field(None, description="Answers begin with the prompt.")
    best_of: int | None = Field(None, description="Refused unless it is `n`.")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One or more."""
        prompt: Any = self.prompt
        return prompt if isinstance(prompt, list) and not isinstance(next(iter(prompt), 0), int) else [prompt]

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.samples):
            raise Unsupported(f"best_of is {self.best_of}; allowed: n, which is {self.samples}", param="best_of")
        if self.session_id is not None and (len(self.prompts) > 1 or self.echo):
            said = "session_id with several prompts or echo; allowed: one prompt, without echo"
            raise InvalidRequest(said, param="session_id")

    def engine_options(self) -> dict[str, Any]:
        given = super().engine_options()
        given["max_new_tokens"] = 16 if self.max_tokens is None else self.max_tokens
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
            if self.echo:
                given["input_logprobs"] = self.logprobs
        return given


class Part(Body):
    """A piece of a message's content."""

    ignored = frozenset({"prompt_cache_breakpoint"})

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise unsupported("type", f"is {shown(kind)}; that is not supported, allowed: 'text'")
        return given


class ChatMessage(Body):
    """A message; what an answer of this server has besides is accepted."""

    ignored = frozenset({"name"})
    not_there = dict.fromkeys(("annotations", "audio", "function_call", "refusal", "tool_call_id", "tool_calls"), _NONE)

    role: str = Field(max_length=64, examples=["user"])
    content: str | Messages[Part] = Field(examples=["Hello!"])

    @field_validator("role")
    @classmethod
    def _known(cls, role: str) -> str:
        if role not in ROLES:
            raise unsupported("", f"is {shown(role)}; that is not supported, allowed: {', '.join(ROLES)}")
        return role

    def rendered(self) -> dict[str, str]:
        """The message as the engine takes it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(Generation):
    """Messages to be answered."""

    text_field = "messages"
    messages: Messages[ChatMessage] = Field(description="With `session_id`: only the new ones.")
    max_tokens: int | None = Field(None, ge=1, le=2**40, description="As many as fit if not given.")
    max_completion_tokens: int | None = Field(None, ge=1, le=2**40, description="The same.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="So many of the likeliest at every place.")

    @model_validator(mode="before")
    @classmethod
    def _few_parts(cls, given: Any) -> Any:
        """Raises `InvalidRequest` before any of them is looked at."""
        messages = given.get("messages") if isinstance(given, dict) else None
        contents = (
            [one.get("content") for one in messages if isinstance(one, dict)] if isinstance(messages, list) else ()
        )
        parts = sum(len(content) for content in contents if isinstance(content, list))
        if parts > MOST_MESSAGES:
            raise InvalidRequest(
                f"messages have {parts} parts of content; allowed: at most {MOST_MESSAGES}", param="messages"
            )
        return given

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            said = "top_logprobs without logprobs; allowed: only with logprobs true"
            raise InvalidRequest(said, param="top_logprobs")
        if not self.messages and self.session_id is None:
            said = "there are no messages; allowed: at least one, or a session_id"
            raise InvalidRequest(said, param="messages")

    def engine_options(self) -> dict[str, Any]:
        given = super().engine_options()
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if most is not None:
            given["max_new_tokens"] = most
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given
