"""OpenAI-compatible requests, with the options that clients of vLLM and SGLang add."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from tenuto.base.checks import MAX_COUNT, shown
from tenuto.base.errors import InvalidRequest, Unsupported
from tenuto.base.sampling import MAX_TOKEN_ID
from tenuto.base.tools.variables import FIELD
from tenuto.base.turns import Message
from tenuto.serve.openai.formats import Structured
from tenuto.serve.openai.templates import Templated
from tenuto.serve.openai.tools import NO_CALLS, Calls, WithTools
from tenuto.serve.shared.llama_fields import FINE_TUNING, LEFT, SAMPLERS
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.samples import MAX_SAMPLES
from tenuto.serve.shared.schemas import (
    MAX_MESSAGES,
    Id,
    Items,
    Messages,
    ModelName,
    Prompts,
    TokenId,
    field_of,
    required,
    unsupported,
)
from tenuto.serve.shared.turn_request import RUN_FIELD, options_but, with_options
from tenuto.serve.shared.undone import leave_undone

IGNORED = frozenset(
    (
        *("custom_labels", "guided_decoding_backend", "metadata", "request_id", "rid", "safety_identifier", "user"),
        "include_reasoning",
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("separate_reasoning", "spaces_between_special_tokens", "stream_reasoning"),
        *FINE_TUNING,
    )
)
"""Fields that never change an answer here."""
UNDONE: dict[str, tuple[Any, ...]] = {
    "store": NOTHING,
    **dict.fromkeys(("verbosity", "web_search_options"), (None,)),
    "reasoning_effort": (None, "none"),
    "service_tier": (None, "auto", "default"),
    **LEFT,
}
"""Fields that are accepted but not carried out, with the values that mean the same as their absence."""
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "documents", "functions", "logits_processors", "moderation"), NOTHING),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs", "chat_template_kwargs", "vllm_xargs"), NOTHING),
    **dict.fromkeys(("custom_params", "session_params", "structural_tag"), NOTHING),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params"), NOTHING),
    **dict.fromkeys(("early_stopping", "no_stop_trim", "use_beam_search"), NOTHING),
    **dict.fromkeys(("repetition_detection", "return_cached_tokens_details", "return_hidden_states"), NOTHING),
    **dict.fromkeys(("return_meta_info", "return_routed_experts"), NOTHING),
    **dict.fromkeys(("data_parallel_rank", "disagg_prefill_dp_rank", "routed_dp_rank", "suffix"), (None,)),
    **dict.fromkeys(("guided_whitespace_pattern", "thinking_token_budget"), (None,)),
    **dict.fromkeys(("cache_salt", "chat_template", "custom_logit_processor", "lora_path"), (None, "")),
    "skip_special_tokens": (None, True),
    "extra_key": (None, "", []),
    "function_call": (None, "none", "auto"),
    "length_penalty": (None, 1),
    "modalities": (None, ["text"]),
    **SAMPLERS,
}
"""Known fields that are not supported, with the values that mean the same as their absence."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages; the first two mean the same."""


class StreamOptions(ForeignObject):
    """Options of a stream."""

    ignored = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(None, description="End with a chunk that has the usage of all choices.")
    continuous_usage_stats: bool | None = Field(
        None, description="With `include_usage`, every chunk has the usage of its choice so far."
    )


@with_options(*options_but("grammar", "input_logprobs", "logprobs"), temperature="1 if not given.")
class Generation(Structured):
    """The fields that both kinds of completion share. `session_id` and some options are not OpenAI's but come from
    vLLM, SGLang and the engine."""

    apis: ClassVar[tuple[str, ...]] = ("openai",)
    too_long = "This model's maximum context length is {limit} tokens"
    ignored = IGNORED
    undone = UNDONE
    not_supported = NOT_SUPPORTED

    model: ModelName = None
    n: int | None = Field(
        None, ge=1, le=MAX_SAMPLES, description="Number of answers to each prompt, which is computed once."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, description="Chosen by the server if not given.")
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID, description="-1 and 0 keep all tokens.")
    prompt_logprobs: int | None = field_of(
        "input_logprobs", "Log-probabilities of the prompt's tokens, with this many of the likeliest; not for streams."
    )
    return_token_ids: bool | None = Field(None, description="Show the token ids of prompts and answers.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="In log-probabilities, write each token as `token_id:` and its id."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_COUNT, description="Use only so many of the prompt's tokens; -1: as many as fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The end of the prompt that `truncate_prompt_tokens` cuts off; `left` if not given."
    )
    verbose: bool | None = Field(None, description="Show a whole answer's prompt, as llama.cpp's `__verbose`.")
    timings_per_token: bool | None = Field(None, description="Show times as llama.cpp does, also in chunks of streams.")
    session_id: Id | None = Field(
        None,
        description="The request is a turn of this session, opened if it does not exist: send only new input."
        " The answer has the session's `version`.",
    )

    @property
    def samples(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        """Whether all chunks of a stream have the usage."""
        return (
            self.usage_at_end and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    def check(self) -> None:
        """Raises `InvalidRequest` for conflicting fields."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options without stream; allowed: only with stream true", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs with stream; allowed: without stream", param="prompt_logprobs")
        if self.truncate_prompt_tokens is not None:
            field, most = "truncate_prompt_tokens", self.truncate_prompt_tokens
            if most == 0:
                raise InvalidRequest(f"{field} is 0; allowed: -1, or at least 1", param=field)
            if self.session_id is not None:
                raise InvalidRequest(f"{field} with session_id; allowed: one of them", param=field)
        if self.session_id is not None and self.samples > 1:
            raise InvalidRequest(f"n is {self.n}; allowed with session_id: 1, or fork the session", param="n")

    def most(self, context: int) -> int | None:
        """Returns `StartTurn.most`, for a context of so many tokens: with -1, the prompt and `max_tokens`, or at least
        one token, fit."""
        if self.truncate_prompt_tokens is None:
            return None
        room = max(1, context - (self.given().get("max_new_tokens") or 1))
        most = room if self.truncate_prompt_tokens < 0 else self.truncate_prompt_tokens
        return -most if self.truncation_side == "right" else most

    def given(self) -> dict[str, Any]:
        return {**super().given(), "input_logprobs": self.prompt_logprobs}


@with_options("logprobs", max_new_tokens="16 if not given.")
class CompletionBody(Generation):
    """A text to continue."""

    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **NOT_SUPPORTED,
        "add_special_tokens": (None, True),
        "prompt_embeds": (None,),
    }

    usual: ClassVar[dict[str, Any]] = {**Generation.usual, "max_new_tokens": 16}
    input_field = "prompt"
    prompt: str | Items[TokenId] | Prompts[str] | Prompts[Items[TokenId]] = Field(
        description="Text or token ids, or a list of either.", examples=["Once upon a time"]
    )
    logprobs: int | None = field_of("logprobs", "Show the logprob of every token, with this many of the likeliest.")
    echo: bool | None = Field(None, description="Begin answers with the prompt.")
    best_of: int | None = Field(None, description="Must equal `n`.")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, one or more."""
        prompt: Any = self.prompt
        return prompt if isinstance(prompt, list) and not isinstance(next(iter(prompt), 0), int) else [prompt]

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.samples):
            raise Unsupported(f"best_of is {self.best_of}; allowed: n, which is {self.samples}", param="best_of")
        if self._echoes_logprobs and self.prompt_logprobs not in (None, self.logprobs):
            raise InvalidRequest(
                f"prompt_logprobs is {self.prompt_logprobs}; allowed with echo: logprobs, which is {self.logprobs}",
                param="prompt_logprobs",
            )
        if self.session_id is not None and (len(self.prompts) > 1 or self.echo):
            raise InvalidRequest(
                "session_id with several prompts or echo; allowed: one prompt, without echo", param="session_id"
            )

    def given(self) -> dict[str, Any]:
        given = super().given()
        return {**given, "input_logprobs": self.logprobs} if self._echoes_logprobs else given

    @property
    def _echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None


class InMessage(ForeignObject):
    """A part of a conversation. Fields that it does not have are accepted, as by other servers, and are reported as
    left undone unless they never have an effect. `place`: that of its fields in the report."""

    place: ClassVar[str] = "messages"

    @classmethod
    def _ignores(cls, name: str, value: Any, left_out: Collection[str]) -> bool:
        if not super()._ignores(name, value, left_out):
            leave_undone(f"{cls.place}.{name}")
        return True


class ContentPart(InMessage):
    """A piece of a message's content."""

    place = "messages.content"
    has_kinds = True
    ignored = frozenset({"cache_control", "prompt_cache_breakpoint"})

    type: Literal["text"]
    text: str


class ChatMessage(InMessage):
    """A message."""

    ignored = frozenset(
        (
            *("cache_control", "id", "metadata", "provider_specific_fields"),
            *("reasoning_details", "thinking_blocks"),
        )
    )
    not_supported = NO_CALLS

    role: str = Field(max_length=64, examples=["user"])
    content: str | Messages[ContentPart] | None = Field(None, examples=["Hello!"])
    tool_calls: Calls | None = Field(None, description="Calls in an assistant's message.")
    name: str | None = Field(
        None,
        max_length=256,
        description="In a tool's message, the function; in others the speaker, if the model's template writes it.",
    )
    tool_call_id: str | None = Field(None, max_length=256, description="In a tool's message, the call it answers.")
    reasoning_content: str | None = Field(None, description="An assistant's thoughts before its answer.")
    reasoning: Any = Field(None, description="vLLM's name of `reasoning_content`.")

    @field_validator("role")
    @classmethod
    def _known(cls, role: str) -> str:
        if role not in ROLES:
            raise unsupported("", f"is {shown(role)}, which is not supported; allowed: {', '.join(ROLES)}")
        return role

    def rendered(self) -> Message:
        """Returns the message in the engine's form."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        return Message(
            "system" if self.role == "developer" else self.role,
            text,
            tuple(call.call() for call in self.tool_calls or ()),
            self.tool_call_id or "",
            self.name or "",
            self.reasoning_content or (self.reasoning if isinstance(self.reasoning, str) else ""),
        )

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise unsupported("tool_calls", f"is in a message of role {self.role}; allowed: of role assistant")
        if self.content is None and self.role != "assistant":
            raise required("content")
        return self


def check_continuing(continues: bool | None, generate: bool | None, messages: Sequence[ChatMessage] | None) -> None:
    """Raises `InvalidRequest` if an answer is to continue the last message, and cannot. `generate`: the field
    `add_generation_prompt`."""
    field = "continue_final_message"
    if continues and generate is not False:
        raise InvalidRequest(f"{field} without add_generation_prompt false; allowed: with it", param=field)
    if continues and (not messages or messages[-1].role != "assistant" or messages[-1].tool_calls):
        raise InvalidRequest(f"{field} where the last message is not an answer; allowed: after one", param=field)


class Prediction(ForeignObject):
    """Text that the answer will largely repeat."""

    type: Literal["content"]
    content: str | Messages[ContentPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


@with_options()
class ChatBody(Generation, WithTools, Templated):
    """Messages to answer."""

    apis = ("chat", "openai")
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **{name: harmless for name, harmless in NOT_SUPPORTED.items() if name != FIELD},
        "add_special_tokens": (None, False),
        "best_of": (None, 1),
    }

    input_field = "messages"
    messages: Messages[ChatMessage] = Field(description="With `session_id`, only the new messages.")
    max_tokens: int | None = field_of("max_new_tokens", ge=1)
    max_completion_tokens: int | None = field_of("max_new_tokens", "Newer name of `max_tokens`.", ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = field_of("logprobs", "Number of likeliest tokens to show at every position.")
    store: bool | None = Field(None, description="Keep the chat and its messages, to be read again.")
    metadata: Any = Field(None, description="With `store`, kept with the chat.")
    prompt_cache_key: Any = RUN_FIELD
    user: Any = RUN_FIELD
    prediction: Prediction | str | None = Field(None, description="Text that the answer will largely repeat.")
    include_reasoning: bool | None = Field(None, description="Show the answer's thoughts; true if not given.")
    add_generation_prompt: bool | None = Field(
        None, description="False: the model goes on where the template ends the last message, without `session_id`."
    )
    continue_final_message: bool | None = Field(
        None, description="The last message is the assistant's, and the answer continues it."
    )
    echo: bool | None = Field(None, description="Begin the answer with the message that it continues.")

    @model_validator(mode="before")
    @classmethod
    def _few_parts(cls, given: Any) -> Any:
        """Raises `InvalidRequest` if there are too many parts of content, before any is validated."""
        messages = given.get("messages") if isinstance(given, dict) else None
        contents = (
            [one.get("content") for one in messages if isinstance(one, dict)] if isinstance(messages, list) else ()
        )
        parts = sum(len(content) for content in contents if isinstance(content, list))
        if parts > MAX_MESSAGES:
            raise InvalidRequest(
                f"messages have {parts} parts of content; allowed: at most {MAX_MESSAGES}", param="messages"
            )
        return given

    def check(self) -> None:
        super().check()
        check_continuing(self.continue_final_message, self.add_generation_prompt, self.messages)
        if self.add_generation_prompt is False and not self.continue_final_message and self.session_id is not None:
            raise Unsupported(
                "add_generation_prompt is false with session_id; allowed: without it, or with continue_final_message",
                param="add_generation_prompt",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs without logprobs; allowed: only with logprobs true", param="top_logprobs"
            )
        if not self.messages and self.session_id is None:
            raise InvalidRequest("there are no messages; allowed: at least one, or a session_id", param="messages")

    def run_name(self) -> str | None:
        given = (self.prompt_cache_key, self.user)
        return next((name for name in given if isinstance(name, str)), None)

    @property
    def echoed(self) -> str:
        """The text with which the answer begins."""
        return self.messages[-1].rendered().content if self.echo and self.continue_final_message else ""

    def given(self) -> dict[str, Any]:
        given = {**super().given(), "logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        if isinstance(self.prediction, Prediction):
            given["prediction"] = self.prediction.text
        return given
