"""A turn's input, its output, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Literal

import msgspec

from tenuto.base.checks import items, whole, wrong
from tenuto.base.errors import InvalidRequest, TenutoError
from tenuto.base.options import MAX_NEW_TOKENS
from tenuto.base.sampling import MAX_TOKEN_ID, TokenLogprob
from tenuto.base.tools.definitions import ToolCall
from tenuto.base.wire.bodies import named

TurnKind = Literal["turn", "append", "regenerate"]
"""Append input and generate; append input alone; generate the last turn's output again."""

Keep = int | Literal["delivered", "all"] | None
"""The part of an aborted turn to commit: nothing (`None`), or its input and this many output tokens, those whose text
has been "delivered", or "all"."""


MESSAGE_SIZE = 2**5
"""Characters added to the size of every message for the text that a template writes around it."""
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. An assistant's message may have `tool_calls`, and the `reasoning` before it. A tool's
    message names its call and its function (`name`). In other messages `name` is the speaker. Raises `InvalidRequest`
    on an unknown role or content that is not text."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidRequest(f"a message has role {self.role!r}; allowed: {', '.join(ROLES)}")
        for name in ("content", "tool_call_id", "name", "reasoning"):
            if not isinstance(getattr(self, name), str):
                raise InvalidRequest(f"a message's {name} is a {type(getattr(self, name)).__name__}; allowed: text")

    @property
    def size(self) -> int:
        """The number of its characters, with an allowance for those that a template writes around them."""
        calls = sum(len(call.name) + len(call.arguments) + len(call.id) for call in self.tool_calls)
        return MESSAGE_SIZE + len(self.content) + len(self.reasoning) + calls

    @classmethod
    def from_dict(cls, raw: object) -> Message:
        """Reads a client's object with `role`, `content` and optionally `tool_calls`, `tool_call_id`, `name` and
        `reasoning`. A tool call is an object with `name` and optionally `arguments`, as JSON text, and `id`. The
        content of an assistant's message that only makes calls may be `None`."""
        if not isinstance(raw, Mapping) or not {"role", "content"} <= set(raw) <= set(cls.__annotations__):
            given = sorted(map(str, raw)) if isinstance(raw, Mapping) else type(raw).__name__
            more = ", ".join(cls.__annotations__.keys() - {"role", "content"})
            raise InvalidRequest(f"a message has {given}; allowed: role and content, and of {more} what it has")
        calls = items("tool_calls", raw.get("tool_calls") or (), "a list of tool calls")
        rest = {name: value for name, value in raw.items() if name != "tool_calls"}
        if rest["content"] is None and rest["role"] == "assistant":
            rest["content"] = ""
        return cls(**rest, tool_calls=tuple(map(ToolCall.of, calls)))


TurnInput = str | Sequence[int | Message]
"""Text, token ids or chat messages."""

Input = str | Iterable[int] | Sequence[Mapping[str, str]]
"""A turn's input as callers write it: text, token ids, or chat messages (objects with `role` and `content`)."""


def turn_input(given: Input | TurnInput) -> str | tuple[int, ...] | tuple[Message, ...]:
    """Returns checked input. Raises `InvalidRequest` unless it is text, token ids or messages."""
    if isinstance(given, str):
        return given
    parts = items("input", given, "text, token ids, or a list of messages")
    if parts and isinstance(parts[0], Mapping | Message):
        return tuple(part if isinstance(part, Message) else Message.from_dict(part) for part in parts)
    return tuple(whole("a token id of the input", part, 0, MAX_TOKEN_ID, param="input") for part in parts)


MAX_PIECES = 256
"""The most pieces of text in a transcript before they are joined, so that reading it after every piece stays cheap."""


class TurnState(StrEnum):
    """The four states of an open turn, and the two of one that has ended."""

    DRAFTING = "drafting"
    QUEUED = "queued"
    RUNNING = "running"
    PREEMPTED = "preempted"
    COMMITTED = "committed"
    ABORTED = "aborted"

    @property
    def ended(self) -> bool:
        return self in (TurnState.COMMITTED, TurnState.ABORTED)


class EndReason(StrEnum):
    """Why a turn ended."""

    STOP = "stop"  # a stop id, string or pattern
    LENGTH = "length"  # max_new_tokens, or what fits
    APPENDED = "appended"  # a prefill-only turn has been computed
    ABORT = "abort"  # by the caller, a disconnect or a closing session
    DEADLINE = "deadline"  # one of its deadlines passed
    GRAMMAR = "grammar"  # its grammar proved too complex, or no token can satisfy it
    FAILED = "failed"  # steps with it fail, even those that run it alone


@dataclass(frozen=True, slots=True)
class Usage:
    """Exact token counts of an ended turn. `prompt`: history and input; `cached`: tokens of these whose state was
    already in memory; `generated`: sampled tokens; `computed`: tokens computed, including wrong guesses and repeats
    after a preemption; `accepted` and `rejected`: guessed tokens that became output, and those that did not.
    `recomputed`: tokens computed again whose state had been there before, by the reason why it was lost."""

    prompt: int = field(metadata=named("prompt_tokens"))
    cached: int = field(metadata=named("cached_tokens"))
    generated: int = field(metadata=named("completion_tokens"))
    computed: int = field(metadata=named("computed_tokens"))
    accepted: int = field(default=0, metadata=named("accepted_prediction_tokens"))
    rejected: int = field(default=0, metadata=named("rejected_prediction_tokens"))
    recomputed: dict[str, int] = field(default_factory=dict, hash=False, metadata=named("recomputed_tokens"))


class OutputSpan(msgspec.Struct, frozen=True, gc=False):
    """Output tokens of a turn that the same weights have sampled: those after the span before, up to the first
    `output_tokens` of the output. `weight_version`: the weights' version."""

    output_tokens: int
    weight_version: str


@dataclass(frozen=True, slots=True)
class TurnResult:
    """How a turn ended. `version` is the session's; `kept` the number of output tokens committed; `max_new_tokens` the
    effective value; `context_left` the tokens that still fit; `stop` the stop id, string or pattern that ended it, if
    any. `weight_versions`: which weights sampled its output, kept or not; without output, those in use at its end.
    `queued`: seconds from its arrival at the engine until it began to compute, or to its end; ignored by `==`."""

    reason: EndReason
    committed: bool
    version: int
    kept: int
    usage: Usage
    max_new_tokens: int
    context_left: int
    stop: str | int | None = None
    weight_versions: tuple[OutputSpan, ...] = ()
    queued: float = field(default=0.0, compare=False, metadata=named("queued_seconds"))


class Delta(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The output of a turn since its last delta. `delivered`: the number of leading output tokens whose text has been
    delivered completely. `result`: the turn's result, in its last delta only. `logprobs`: one per token, if requested.
    `input_logprobs`: if requested, in the first delta with tokens or a result. The first token of a sequence has
    `None`, and the last ones may be missing if the turn was aborted early. `vector`: if requested, in the last delta of
    a turn that has computed its input: little-endian float32 numbers; see `TurnParams.pooling`."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    delivered: int = 0
    result: TurnResult | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    input_logprobs: tuple[TokenLogprob | None, ...] = ()
    vector: bytes = b""

    @property
    def scores(self) -> int:
        """The number of its log-probabilities."""
        return len(self.logprobs) + len(self.input_logprobs)

    def with_bytes(self, raw: Callable[[int], bytes]) -> Delta:
        """Returns a copy whose log-probabilities have the bytes of their tokens, which `raw` returns."""
        outputs = tuple(entry.with_bytes(raw) for entry in self.logprobs)
        inputs = tuple(entry.with_bytes(raw) if entry is not None else None for entry in self.input_logprobs)
        return msgspec.structs.replace(self, logprobs=outputs, input_logprobs=inputs)


def joined(deltas: Sequence[Delta]) -> Delta:
    """Merges deltas into one."""
    if len(deltas) == 1:
        return deltas[0]
    if not deltas:
        return Delta()
    return Delta(
        tuple(chain.from_iterable([delta.tokens for delta in deltas])),
        "".join([delta.text for delta in deltas]),
        deltas[-1].delivered,
        deltas[-1].result,
        tuple(chain.from_iterable([delta.logprobs for delta in deltas])),
        tuple(chain.from_iterable([delta.input_logprobs for delta in deltas])),
        b"".join([delta.vector for delta in deltas]),
    )


class AbortGate:
    """Passes a turn's deltas on to its readers. After an abort has begun, deltas are held back until the result is
    there; then the part that was committed passes as one delta."""

    def __init__(self) -> None:
        self.delivered = 0  # leading output tokens whose text has passed
        self._tokens = 0  # that have passed
        self._held: list[Delta] | None = None  # since the abort began

    def begin_abort(self) -> None:
        """Holds back all later deltas, since they may not be committed."""
        if self._held is None:
            self._held = []

    @property
    def held(self) -> Sequence[Delta]:
        """The deltas that are held back now."""
        return self._held or ()

    def take(self, delta: Delta) -> Delta | None:
        """Returns the delta to pass on after `delta` has come, or `None` if it is held back."""
        if self._held is not None:
            self._held.append(delta)
            if delta.result is None:
                return None
            delta, self._held = self._kept(self._held, delta.result), []
        self._tokens += len(delta.tokens)
        self.delivered = delta.delivered
        return delta

    def _kept(self, held: Sequence[Delta], result: TurnResult) -> Delta:
        """Returns one delta with the committed part of `held`."""
        room = result.kept - self._tokens
        if not result.committed or room < 0:
            return Delta(delivered=self.delivered, result=result)
        together = joined(held)
        whole_ones = [delta for delta in held if delta.delivered <= result.kept]  # those without text of dropped tokens
        return Delta(
            together.tokens[:room],
            "".join(delta.text for delta in whole_ones),
            whole_ones[-1].delivered if whole_ones else self.delivered,
            result,
            together.logprobs[:room],
            together.input_logprobs,
            together.vector,
        )


class Transcript:
    """Collects the deltas of a turn that pass an `AbortGate`."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.input_logprobs: list[TokenLogprob | None] = []
        self.vector = b""
        self.result: TurnResult | None = None
        self.failure: TenutoError | None = None
        self._pieces: list[str] = []  # of text
        self._gate = AbortGate()
        self.begin_abort = self._gate.begin_abort

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def ended(self) -> bool:
        """Whether the turn has ended. Raises the error that ended it, if any."""
        if self.failure is not None:
            raise self.failure
        return self.result is not None

    def take(self, news: Delta | TenutoError) -> Delta:
        """Adds a delta and returns the delta that the gate lets pass. Raises `news` if it is an error."""
        if isinstance(news, TenutoError):
            self.failure = news
            raise news
        passed = self._gate.take(news)
        if passed is None:
            return Delta(delivered=self._gate.delivered)
        self.token_ids += passed.tokens
        self.logprobs += passed.logprobs
        self.input_logprobs += passed.input_logprobs
        self.vector += passed.vector
        if passed.text:
            self._pieces.append(passed.text)
            if len(self._pieces) > MAX_PIECES:
                self._pieces = [self.text]
        self.result = passed.result
        return passed

    def tokens_to_keep(self, keep: Keep) -> Keep:
        """Returns `keep`, with "delivered" replaced by the number of output tokens whose text has passed so far. Raises
        `InvalidRequest`."""
        return self._gate.delivered if check_keep(keep) == "delivered" else keep


def last_role(given: TurnInput) -> str:
    """Returns the role of the input's last message; empty if the input is not messages."""
    last = given[-1] if len(given) else None
    return last.role if isinstance(last, Message) else ""


def check_keep(keep: Keep) -> Keep:
    """Returns `keep`. Raises `InvalidRequest` if it is not a valid choice."""
    if keep is None or (isinstance(keep, str) and keep in ("delivered", "all")):
        return keep
    if isinstance(keep, str):
        raise wrong("keep", keep, "none, a number of output tokens, 'delivered' or 'all'")
    return whole("keep", keep, 0, MAX_NEW_TOKENS)
