"""SGLang-compatible requests, and their items: one per prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast
from uuid import uuid4

from pydantic import Field

from tenuto.base.checks import MAX_COUNT
from tenuto.base.errors import InvalidRequest, Unsupported
from tenuto.base.options import TurnOptions, TurnParams, turn_params
from tenuto.base.plan import MemoryPart
from tenuto.base.sampling import MAX_LISTED, MAX_LOGPROBS
from tenuto.base.tools.grammar import Grammar
from tenuto.serve.shared.grammars import GrammarField, of_regex, of_rules, only_one
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.samples import MAX_SAMPLES
from tenuto.serve.shared.schemas import ID_LENGTH, MAX_PROMPTS, Id, Items, ModelName, Prompts, TokenId, field_of
from tenuto.serve.shared.turn_request import TurnRequest, options_but, with_options

GREEDY_BELOW = 1e-6
"""Temperatures below this count as 0."""
IGNORED = frozenset(
    (
        *("conversation_id", "custom_labels", "external_trace_header", "log_metrics", "no_logs", "received_time"),
        *("routing_key", "session_id"),
    )
)
"""Fields that never change an answer here."""

TokenIds = Items[TokenId]
Rid = Annotated[str, Field(min_length=1, max_length=256)]
StartLength = Annotated[int, Field(ge=-1, le=MAX_COUNT)]
AdapterName = Annotated[str, Field(max_length=128)]
TopNumber = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
NamedIds = Annotated[TokenIds, Field(max_length=MAX_LISTED)]


class SGLangObject(ForeignObject):
    """An object in a request. An unknown field is refused unless its value means the same as its absence."""

    ignored = IGNORED
    unknown = (*NOTHING, "")
    complete = False


class OpenSessionRequest(SGLangObject):
    """A session to open. A `streaming` session allows only appending; in others, any request can be continued."""

    capacity_of_str_len: int = Field(
        0, ge=-(2**63), lt=2**63, description="Stored with the session; its real limit is the context length."
    )
    session_id: Id | None = Field(None, description="Chosen by the server if not given.")
    streaming: bool | None = None
    timeout: float | None = field_of("ttl")
    lora_path: str | None = Field(None, max_length=128, description="The name of a loaded adapter, for all requests.")


class CloseSessionRequest(SGLangObject):
    """A session to close."""

    session_id: Id


class AbortRequest(SGLangObject):
    """Requests to end."""

    rid: str | None = None
    abort_all: bool = False


class PauseRequest(SGLangObject):
    """The fate of open requests during a pause: `abort` ends them, `retract` releases their memory, which is computed
    again later, and `in_place` only lets them wait."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class MemoryRequest(SGLangObject):
    """The memory to release or to allocate again: the state of sessions, the weights, or both. There is no separate
    memory for CUDA graphs, so their tag alone changes nothing."""

    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = Field(
        None, min_length=1, max_length=8, description="Both if not given. `cuda_graph` has no effect."
    )

    @property
    def parts(self) -> list[MemoryPart]:
        """The parts of memory that the tags select."""
        if self.tags is None:
            return ["kv_cache", "weights"]
        return [tag for tag in self.tags if tag != "cuda_graph"]


class SessionParams(SGLangObject):
    """The place in a session where a request continues: after the request `rid`, without its output if
    `drop_previous_output`, and after its first `offset` tokens if given. `replace` discards the requests that followed
    `rid`."""

    id: str | None = Field(None, max_length=ID_LENGTH)
    rid: str | None = None
    offset: int | None = Field(None, ge=-MAX_COUNT, le=MAX_COUNT)
    replace: bool | None = None
    drop_previous_output: bool | None = None


NOT_HERE = (
    *("grammar", "include_stop", "input_logprobs", "logprob_ids", "logprobs"),
    *("priority", "queue_timeout", "timeout"),
)
"""Options that are not sampling parameters in SGLang."""


@with_options(*options_but(*NOT_HERE), temperature="1 if not given; 0 is greedy.")
class SamplingParams(SGLangObject, TurnRequest):
    """Sampling parameters. `null` means the default, except that `null` as `max_new_tokens` means as many as fit."""

    apis = ("sglang",)

    max_new_tokens: int | None = field_of("max_new_tokens", default=128)
    top_k: int | None = field_of("top_k", "-1 keeps all.", ge=-1)
    sampling_seed: int | None = Field(None, description="Chosen by the server if not given.")
    json_schema: str | None = Field(None, description="The output is JSON by this schema, given as JSON text.")
    regex: str | None = Field(None, description="The output matches this expression as a whole.")
    ebnf: str | None = Field(None, description="The output follows these rules, written as EBNF or for Lark.")
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = Field(None, description="No effect: there are no such spaces.")
    stream_interval: int | None = Field(None, ge=1, description="No effect: chunks arrive as tokens do.")

    def grammar_field(self) -> GrammarField | None:
        return only_one(
            ("json_schema", Grammar.of_schema, self.json_schema),
            ("regex", of_regex, self.regex),
            ("ebnf", of_rules, self.ebnf),
        )

    def given(self) -> dict[str, Any]:
        given = super().given()
        if self.top_k == 0:
            raise InvalidRequest("top_k is 0; allowed: -1 for all, or at least 1", param="top_k")
        if given.get("temperature", 1.0) < GREEDY_BELOW:
            given["temperature"] = 0.0
        return given


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The contents of an answer. `logprob_start`: the first prompt token whose log-probability is shown; -1 shows none
    of the prompt. `special_tokens`: the text has control tokens. `trim_stop`: the text leaves out the stop that ended
    it."""

    logprob_start: int
    token_text: bool
    special_tokens: bool
    trim_stop: bool


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a request. `family`: the id by which all prompts of the request can be aborted.
    `adapter`: as in `StartTurn`."""

    rid: str
    family: str
    input: str | list[int]
    params: TurnParams
    session: SessionParams | None
    n: int
    output: OutputOptions
    adapter: str | None = None

    @property
    def scored(self) -> bool:
        """Whether the answer has log-probabilities."""
        return self.params.scores_output


_USUAL = SamplingParams.model_validate({})
"""Parameters of prompts that come without any."""


@with_options("priority")
class GenerateRequest(SGLangObject, TurnRequest):
    """One prompt to continue, or a list of prompts. A value that is not a list applies to all of them."""

    too_long = "The input is longer than the model's context length ({limit} tokens)"

    text: str | Prompts[str] | None = None
    input_ids: TokenIds | Prompts[TokenIds] | None = None
    sampling_params: SamplingParams | Prompts[SamplingParams] | None = None
    stream: bool | None = None
    rid: Rid | Prompts[Rid] | None = Field(
        None, description="For several prompts, `_0`, `_1` and so on are appended to it."
    )
    return_logprob: bool | Prompts[bool] | None = None
    logprob_start_len: StartLength | Prompts[StartLength] | None = None
    top_logprobs_num: TopNumber | Prompts[TopNumber] | None = None
    token_ids_logprob: NamedIds | Prompts[NamedIds | None] | None = Field(
        None, description="With `return_logprob`: token ids whose log-probabilities are shown at every position."
    )
    return_text_in_logprobs: bool | None = None
    session_params: SessionParams | Prompts[SessionParams] | None = None
    model: ModelName = None
    lora_path: AdapterName | Prompts[AdapterName] | None = Field(
        None, description="The name of a loaded adapter; goes before `model`."
    )

    @property
    def several(self) -> bool:
        """Whether the answer is a list."""
        ids = self.input_ids
        return isinstance(self.text, list) or bool(ids and isinstance(ids[0], list))

    @property
    def prompts(self) -> int:
        """The number of prompts, at least 1."""
        given: Any = self.text if self.text is not None else self.input_ids
        return len(given) if self.several else 1

    def field(self, option: str | None) -> str | None:
        if option == "input":
            return "text" if self.text is not None else "input_ids"
        if isinstance(self.sampling_params, SamplingParams):
            return self._place(0, self.sampling_params, option)
        return super().field(option)

    def _place(self, number: int, params: SamplingParams, option: str | None) -> str | None:
        """Returns the field that sets an option for prompt `number`, which has these `params`."""
        inner = params.field(option)
        if inner not in SamplingParams.model_fields:
            return super().field(option)
        return (
            f"sampling_params[{number}].{inner}"
            if isinstance(self.sampling_params, list)
            else f"sampling_params.{inner}"
        )

    def items(self, adapter: str | None = None) -> list[Item]:
        """Returns one item per prompt. `adapter`: that of prompts without a `lora_path`, as in `StartTurn`. Raises
        `InvalidRequest` for conflicting fields."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("there are both text and input_ids, or neither; allowed: one of them")
        given: Any = self.text if self.text is not None else self.input_ids
        inputs: list[Any] = given if self.several else [given]
        count = len(inputs)
        if not 1 <= count <= MAX_PROMPTS:
            raise InvalidRequest(f"there are {count} prompts; allowed: 1 to {MAX_PROMPTS}", param="input")
        family = self.rid if isinstance(self.rid, str) else uuid4().hex
        names = self.rid if isinstance(self.rid, list) else None
        if names is None:
            names = [f"{family}_{i}" for i in range(count)] if self.several else [family]
        rids: list[str] = _each("rid", names, count)
        of_prompts = ("sampling_params", "session_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
        lists = [_each(name, getattr(self, name), count) for name in of_prompts]
        ids: Any = self.token_ids_logprob
        lists.append(_each("token_ids_logprob", [ids] * count if ids and isinstance(ids[0], int) else ids, count))
        items = [
            self._item(number, rid, family, *parts)
            for number, (rid, *parts) in enumerate(zip(rids, inputs, *lists, strict=True))
        ]
        adapters = _each("lora_path", self.lora_path, count)
        return [replace(item, adapter=own or adapter) for item, own in zip(items, adapters, strict=True)]

    def _item(
        self,
        number: int,
        rid: str,
        family: str,
        part: str | list[int],
        params: SamplingParams | None,
        session: SessionParams | None,
        wanted: bool | None,
        start: int | None,
        top: int | None,
        named: list[int] | None,
    ) -> Item:
        params = params or _USUAL
        start = start if wanted and start is not None else -1
        try:
            options = params.options()
            options.update(cast("TurnOptions", self.given()))
            if wanted:
                options["logprobs"] = top or 0
                if start >= 0:
                    options["input_logprobs"] = top or 0
                options["logprob_ids"] = named or ()
            turn = turn_params(options)
        except InvalidRequest as error:
            error.param = self._place(number, params, error.param)
            raise
        n = params.n or 1
        if session is not None and session.id is None:
            session = None
        if session is not None and n > 1:
            raise Unsupported(
                f"n is {n}; allowed in a session: 1; continue one request several times instead", param="n"
            )
        output = OutputOptions(
            logprob_start=start,
            token_text=bool(self.return_text_in_logprobs),
            special_tokens=params.skip_special_tokens is False,
            trim_stop=not params.no_stop_trim,
        )
        return Item(rid, family, part, turn, session, n, output)


def _each(name: str, given: Any, count: int) -> list[Any]:
    """Returns a list with one value per prompt. Raises `InvalidRequest`."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        allowed = f"one for each of the {count} prompts"
        raise InvalidRequest(f"{name} has {len(given)} entries; allowed: {allowed}", param=name)
    return given
