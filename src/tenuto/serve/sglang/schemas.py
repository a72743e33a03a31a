"""What requests in SGLang's manner may say, and what of it each turn is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any
from uuid import uuid4

from pydantic import ConfigDict, Field

from tenuto.base.checks import MAX_COUNT
from tenuto.base.errors import InvalidRequest, Unsupported
from tenuto.base.options import MAX_NEW_TOKENS, TurnOptions, TurnParams, turn_params
from tenuto.base.sampling import MAX_LOGPROBS, MAX_TOKEN_ID
from tenuto.serve.invalid import unsupported
from tenuto.serve.native.schemas import ID_LENGTH, ID_PATTERN
from tenuto.serve.shared.samples import MOST_SAMPLES
from tenuto.serve.shared.schemas import (
    MOST_PROMPTS,
    Items,
    Object,
    Prompts,
    TokenId,
    field_of,
    options_of,
    random_seed,
    with_options,
)

GREEDY_BELOW = 1e-6
"""Temperatures below this are 0."""
IGNORED = frozenset(
    {
        "conversation_id",
        "custom_labels",
        "external_trace_header",
        "log_metrics",
        "no_logs",
        "received_time",
        "routing_key",
        "session_id",
    }
)
"""Fields of `/generate` that change no answer here, whatever they say."""

TokenIds = Items[TokenId]
Rid = Annotated[str, Field(min_length=1, max_length=256)]
StartLength = Annotated[int, Field(ge=-1, le=MAX_COUNT)]
TopNumber = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Body(Object):
    """What requests are made of. A field that is not there is refused by its name, unless it asks for nothing."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    def model_post_init(self, _: Any, /) -> None:
        for name, value in (self.model_extra or {}).items():
            if value not in (None, False, "", [], {}) and name not in IGNORED:
                raise unsupported(name, "is not supported; leave it out")


class NewSession(Body):
    """A session to be opened. A `streaming` one is only ever appended to; of others any request can be continued."""

    capacity_of_str_len: int = Field(
        0, ge=-(2**63), lt=2**63, description="Noted with the session; its real limit is the context length."
    )
    session_id: str | None = Field(
        None, pattern=ID_PATTERN, max_length=ID_LENGTH, description="Made up by the server if not given."
    )
    streaming: bool | None = None
    timeout: float | None = field_of(
        "ttl", "Seconds without a turn until it is closed; by default as the server has it."
    )


class OldSession(Body):
    """A session to be closed."""

    session_id: str = Field(pattern=ID_PATTERN, max_length=ID_LENGTH)


class Abort(Body):
    """Requests to be ended."""

    rid: str | None = None
    abort_all: bool = False


class SessionParams(Body):
    """Where in a session a request goes on: after the request `rid`, of which `drop_previous_output` leaves out the
    output and `offset` all but so many tokens. `replace` gives up what followed it."""

    id: str | None = Field(None, max_length=ID_LENGTH)
    rid: str | None = None
    offset: int | None = Field(None, ge=-MAX_COUNT, le=MAX_COUNT)
    replace: bool | None = None
    drop_previous_output: bool | None = None


@with_options(
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_new_tokens",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "top_p",
)
class SamplingParams(Body):
    """How to generate. `null` is the default, but of `max_new_tokens`, where it is as many as fit."""

    max_new_tokens: int | None = Field(128, ge=0, le=MAX_NEW_TOKENS)
    temperature: float | None = field_of("temperature", "1 if not given; 0 is greedy.")
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID, description="-1: all.")
    stop_token_ids: TokenIds | None = field_of("stop_ids")
    sampling_seed: int | None = field_of("seed")
    n: int | None = Field(None, ge=1, le=MOST_SAMPLES)
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = Field(None, description="Changes nothing: there are none.")
    stream_interval: int | None = Field(None, ge=1, description="Changes nothing: chunks come as tokens do.")

    def options(self) -> TurnOptions:
        """By the engine's names."""
        given: TurnOptions = {"temperature": 1.0, **options_of(self)}
        if self.top_k == 0:
            raise InvalidRequest("top_k is 0; allowed: -1 for all, or at least 1", param="top_k")
        if self.top_k == -1:
            del given["top_k"]
        if self.stop_token_ids:
            given["stop_ids"] = self.stop_token_ids
        if given["temperature"] < GREEDY_BELOW:
            del given["temperature"]
        else:
            given["seed"] = self.sampling_seed if self.sampling_seed is not None else random_seed()
        return given


@dataclass(frozen=True, slots=True)
class Look:
    """What the answer shows. `start`: the first prompt token whose log-probability is wanted, -1 for none. `trim`:
    without what ended the turn."""

    logprobs: bool
    start: int
    top: int
    token_text: bool
    special: bool
    trim: bool


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a request. `family`: the id by which several can be aborted at once."""

    rid: str
    family: str
    input: str | list[int]
    params: TurnParams
    session: SessionParams | None
    n: int
    look: Look


class Generate(Body):
    """Prompts to be continued: one, or a list of them. What is not a list then holds for all."""

    text: str | Prompts[str] | None = None
    input_ids: TokenIds | Prompts[TokenIds] | None = None
    sampling_params: SamplingParams | Prompts[SamplingParams] | None = None
    stream: bool | None = None
    rid: Rid | Prompts[Rid] | None = Field(
        None, description="For several prompts, `_0`, `_1` and so on are put behind it."
    )
    return_logprob: bool | Prompts[bool] | None = None
    logprob_start_len: StartLength | Prompts[StartLength] | None = None
    top_logprobs_num: TopNumber | Prompts[TopNumber] | None = None
    return_text_in_logprobs: bool | None = None
    session_params: SessionParams | Prompts[SessionParams] | None = None
    priority: int | None = None

    @property
    def several(self) -> bool:
        """Whether the answer is a list."""
        ids = self.input_ids
        return isinstance(self.text, list) or bool(ids and isinstance(ids[0], list))

    def param(self, option: str | None) -> str | None:
        """The field that an option of the engine's comes from."""
        if option == "input":
            return "text" if self.text is not None else "input_ids"
        name = {"stop_ids": "stop_token_ids", "seed": "sampling_seed"}.get(option or "", option)
        inner = name in SamplingParams.model_fields and isinstance(self.sampling_params, SamplingParams)
        return f"sampling_params.{name}" if inner else name

    def items(self) -> list[Item]:
        """Raises `InvalidRequest` if the parts do not fit together."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("give either text or input_ids")
        given: Any = self.text if self.text is not None else self.input_ids
        inputs: list[Any] = given if self.several else [given]
        count = len(inputs)
        if not 1 <= count <= MOST_PROMPTS:
            raise InvalidRequest(f"there are {count} prompts; allowed: 1 to {MOST_PROMPTS}", param="input")
        family = self.rid if isinstance(self.rid, str) else uuid4().hex
        names = self.rid if isinstance(self.rid, list) else None
        if names is None:
            names = [f"{family}_{i}" for i in range(count)] if self.several else [family]
        params = [
            given or SamplingParams.model_validate({})
            for given in _each("sampling_params", self.sampling_params, count)
        ]
        sessions = _each("session_params", self.session_params, count)
        looks = self._looks(params)
        rids: list[str] = _each("rid", names, count)
        return [
            self._item(rid, family, *parts) for rid, *parts in zip(rids, inputs, params, sessions, looks, strict=True)
        ]

    def _looks(self, params: list[SamplingParams]) -> list[Look]:
        count = len(params)
        return [
            Look(
                logprobs=bool(wanted),
                start=start if wanted and start is not None else -1,
                top=top or 0,
                token_text=bool(self.return_text_in_logprobs),
                special=one.skip_special_tokens is False,
                trim=not one.no_stop_trim,
            )
            for one, wanted, start, top in zip(
                params,
                _each("return_logprob", self.return_logprob, count),
                _each("logprob_start_len", self.logprob_start_len, count),
                _each("top_logprobs_num", self.top_logprobs_num, count),
                strict=True,
            )
        ]

    def _item(
        self,
        rid: str,
        family: str,
        part: str | list[int],
        params: SamplingParams,
        session: SessionParams | None,
        look: Look,
    ) -> Item:
        options = params.options()
        if look.logprobs:
            options["logprobs"] = look.top
            if look.start >= 0:
                options["input_logprobs"] = look.top
        if self.priority is not None:
            options["priority"] = self.priority
        n, turn = params.n or 1, turn_params(options)
        if session is None or session.id is None:
            return Item(rid, family, part, turn, None, n, look)
        if n > 1:
            raise Unsupported(
                f"n is {n}; allowed in a session: 1; continue one request several times instead", param="n"
            )
        return Item(rid, family, part, turn, session, 1, look)


def _each(name: str, given: Any, count: int) -> list[Any]:
    """One value a prompt."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        allowed = f"one for each of the {count} prompts"
        raise InvalidRequest(f"{name} has {len(given)} entries; allowed: {allowed}", param=name)
    return given
