"""The options of a session and of a turn, each declared once with its bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypedDict

from tenuto.base.checks import MAX_COUNT, SECONDS, Bounds, check_options, check_unicode, items, option, whole, wrong
from tenuto.base.errors import InvalidRequest
from tenuto.base.sampling import GREEDY, MAX_LISTED, MAX_LOGPROBS, Sampling, listed
from tenuto.base.tools.grammar import Grammar

MAX_NEW_TOKENS = MAX_COUNT
MAX_STOP_IDS = 64
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 128
"""In characters."""
MAX_PRIORITY = 1000
Pooling = Literal["last", "mean", "first"]
"""Which of a turn's input tokens its vector comes from: the last, the first, or all, of which it is the average."""
POOLINGS: tuple[Pooling, ...] = ("last", "mean", "first")
PRIORITIES = Bounds(-MAX_PRIORITY, MAX_PRIORITY)


def _bad_words(given: object) -> tuple[str, ...]:
    """Returns a list of words. Raises `InvalidRequest` if there are too many, or one is empty or too long."""
    words = items("bad_words", given, "a list of strings")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"there are {len(words)} bad_words; allowed: at most {MAX_BAD_WORDS}", param="bad_words")
    for word in words:
        if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD_LENGTH:
            raise wrong("one of bad_words", word, f"text of 1 to {MAX_BAD_WORD_LENGTH} characters", param="bad_words")
        check_unicode("bad_words", word)
    return words


@dataclass(frozen=True, slots=True)
class TurnParams:
    """The options of a turn.

    `max_new_tokens` `None` means as many as fit. `stop_ids` end the turn and are part of the committed output, like the
    model's own end tokens unless `ignore_eos` is set. Deadlines are seconds from the turn's arrival: `queue_timeout`
    until it first runs, `timeout` until it ends; `None`: no deadline. The session's next turn is expected
    `expect_within` seconds after it has committed. `priority` `None` takes the session's; higher
    runs first.

    The first `min_new_tokens` output tokens are never stop ids, and their text is not searched for stops.
    `logprobs` n requests the log-probability of every output token and of the n likeliest in its place;
    `input_logprobs` does so for every input token except the first of the sequence. With either, `logprob_ids` are
    further tokens whose log-probabilities are requested in each place. See `base.sampling.TokenLogprob`.

    `grammar`: the output is a sentence of the grammar, or the beginning of one if the turn ends early. The turn ends
    where no token can follow. The model's own end tokens are sampled only after a complete sentence.

    No token completes one of `bad_words`, as these encode to tokens, each with and without a blank before it. Other
    spellings of them are not found.

    `pooling` requests a vector: the output of the model's last norm after an input token, or the average of those
    after all of them. A turn with `pooling` generates at least one token. Embedding requests set it.

    `marks`: control tokens that stay visible in the text, by their texts, so that its calls can be parsed. They follow
    from the tools and the model's format; callers do not set them.
    """

    max_new_tokens: int | None = option(
        None,
        "As many as fit if not given.",
        Bounds(0, MAX_NEW_TOKENS),
        names={
            "openai": ("n_predict", "max_tokens"),
            "chat": ("n_predict", "max_completion_tokens", "max_tokens"),
            "responses": "max_output_tokens",
            "anthropic": "max_tokens",
            "ollama": "num_predict",
            "llama.cpp": ("n_predict", "max_tokens"),
        },
    )
    sampling: Sampling = GREEDY
    stop_ids: tuple[int, ...] = option(
        (), "Token ids that end the turn.", names={"openai": "stop_token_ids", "sglang": "stop_token_ids"}
    )
    stop: tuple[str, ...] = option((), "Strings that end the turn.", names={"anthropic": "stop_sequences"})
    stop_regex: tuple[str, ...] = option(
        (), "Regular expressions, in RE2's syntax, whose first match ends the turn; the text ends before it."
    )
    include_stop: bool = option(
        default=False,
        description="The text keeps the stop that ended the turn.",
        names={"openai": "include_stop_str_in_output"},
    )
    ignore_eos: bool = option(default=False, description="Do not stop at the model's own end tokens.")
    priority: int | None = option(None, "Higher runs first.", PRIORITIES)
    queue_timeout: float | None = option(None, "Seconds within which it must have started.", SECONDS)
    timeout: float | None = option(None, "Seconds within which it must have ended.", SECONDS)
    expect_within: float | None = option(
        None, "Seconds after its end within which the session's next turn is expected.", SECONDS
    )
    min_new_tokens: int = option(
        0, "Nothing ends the turn before this many.", Bounds(0, MAX_NEW_TOKENS), names={"openai": "min_tokens"}
    )
    logprobs: int | None = option(
        None,
        "Log-probabilities of output tokens, with this many of the likeliest.",
        Bounds(0, MAX_LOGPROBS),
        names={"llama.cpp": "n_probs"},
    )
    input_logprobs: int | None = option(None, "The same for input tokens.", Bounds(0, MAX_LOGPROBS))
    logprob_ids: tuple[int, ...] = option(
        (),
        "With log-probabilities: token ids whose log-probabilities are shown in each place.",
        names={"openai": "logprob_token_ids"},
    )
    prediction: str = option(
        "", "Text that the output will largely repeat, such as a file to edit; it changes nothing but time."
    )
    speculate: bool = option(
        default=True, description="Tokens may be guessed and computed ahead, which changes none of them."
    )
    grammar: Grammar | None = option(None, "What the output must follow: an object with one field, the kind.")
    bad_words: tuple[str, ...] = option((), "Texts that the output must not contain, as they encode to tokens.")
    pooling: Pooling | None = None
    marks: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        check_options(self)
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise wrong("pooling", self.pooling, " or ".join(POOLINGS))
        if self.pooling is not None and self.max_new_tokens == 0:
            raise InvalidRequest("pooling with max_new_tokens 0; allowed: at least 1", param="pooling")
        if self.max_new_tokens is not None:
            whole("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        object.__setattr__(self, "stop_ids", listed("stop_ids", self.stop_ids, MAX_STOP_IDS))
        object.__setattr__(self, "logprob_ids", listed("logprob_ids", self.logprob_ids, MAX_LISTED))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        for name in ("grammar", "bad_words", "min_new_tokens"):
            if self.sampling.allowed_ids and getattr(self, name):
                raise InvalidRequest(f"allowed_ids with {name}; allowed: one of them", param="allowed_ids")
        if not isinstance(self.prediction, str):
            raise wrong("prediction", self.prediction, "text")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise wrong("grammar", self.grammar, "a Grammar")

    @property
    def constrained(self) -> bool:
        """Whether a tokenizer is needed to know which tokens may come next."""
        return self.grammar is not None or bool(self.bad_words)

    @property
    def scores_input(self) -> bool:
        """Whether log-probabilities of input tokens are requested."""
        return self.input_logprobs is not None

    @property
    def needs_input(self) -> bool:
        """Whether the result depends on outputs of the model after input tokens before the last, so that all of the
        input has to be computed, even if the state after a prefix of it is in memory."""
        return self.scores_input or self.pooling in ("mean", "first")

    @property
    def scores_output(self) -> bool:
        """Whether log-probabilities of output tokens are requested."""
        return self.logprobs is not None

    @property
    def generates(self) -> bool:
        """Whether output tokens are requested."""
        return self.max_new_tokens != 0

    def require_plain(self, what: str) -> None:
        """Raises `InvalidRequest` if results for input tokens are requested. `what`: the operation without them."""
        for name in ("input_logprobs", "pooling"):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name} is not available for {what}", param=name)

    @property
    def input_alone(self) -> TurnParams:
        """These options for a turn that only computes its input."""
        return replace(self, max_new_tokens=0)

    @property
    def output_alone(self) -> TurnParams:
        """These options without log-probabilities of the input."""
        return replace(self, input_logprobs=None) if self.scores_input else self


ONE_TOKEN = TurnParams(max_new_tokens=1, ignore_eos=True)
"""Options of a turn that is run for results beside its text."""
OPTIONS: dict[str, Field[Any]] = {
    each.name: each
    for each in (*fields(Sampling), *fields(TurnParams))
    if each.name not in ("sampling", "pooling", "marks")
}
"""Every option by its name."""
OF_SAMPLING = frozenset(each.name for each in fields(Sampling))
OF_PREFILL = ("priority", "queue_timeout", "timeout", "expect_within", "input_logprobs", "logprob_ids")
"""Options that apply even if nothing is generated."""


@dataclass(frozen=True, slots=True)
class SessionAdapter:
    """The adapter of a session. `digest`: that of its weights, which identify it; empty until the engine has resolved
    the name."""

    name: str
    digest: str = ""

    @classmethod
    def named(cls, name: str | None) -> SessionAdapter | None:
        """Returns the adapter of this name; `None` if there is no name."""
        return cls(name) if name else None


class Scope(NamedTuple):
    """The properties that sessions must share to use each other's memory: the tenant, and the digest of the adapter's
    weights, which is empty without an adapter."""

    tenant: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Policy:
    """The options of a session, which apply to all its turns. `ttl`: an idle session is closed this many seconds after
    its last turn ended; `None`: never. `max_tokens`: cap on its history, at most the context length (the default). An
    `ephemeral` session closes when its only turn ends. `tenant`: its owner. `hidden`: it is not listed. `metadata`: the
    owner's notes. The memory of a `pinned` session never yields to others; room for its maximum length is reserved.
    `adapter`: what all its turns are computed with, besides the model; forks have the same."""

    priority: int = option(0, "Priority of its turns; higher runs first.", PRIORITIES)
    ttl: float | None = option(
        None, "Seconds without a turn until it is closed; the server's default if not given.", SECONDS
    )
    max_tokens: int | None = option(None, "Cap on its history, in tokens.", Bounds(1, MAX_COUNT))
    ephemeral: bool = False
    tenant: str = ""
    hidden: bool = False
    metadata: tuple[tuple[str, str], ...] = ()
    pinned: bool = option(default=False)
    adapter: SessionAdapter | None = None

    def __post_init__(self) -> None:
        check_options(self)

    def with_adapter(self, adapter: SessionAdapter | None) -> Policy:
        """Returns a copy with another adapter."""
        return replace(self, adapter=adapter)

    @property
    def scope(self) -> Scope:
        """See `Scope`."""
        return Scope(self.tenant, self.adapter.digest if self.adapter is not None else "")

    @property
    def lasting(self) -> bool:
        """Whether a journal keeps the session. Ephemeral and hidden sessions are not needed after a restart."""
        return not (self.ephemeral or self.hidden)


class TurnOptions(TypedDict, total=False):
    """Options of a turn, all optional.

    `max_new_tokens`: as many as fit if not given. `temperature` 0 (the default) is greedy; `top_k` 0, `top_p` 1 and
    `min_p` 0 keep every token; the penalties default to 1, 0 and 0, `logit_bias` (token id to number) to none.
    `allowed_ids`: the only token ids that are sampled. `seed`: turns with the same seed draw the same random number at
    the same position. `base.sampling.Sampling` describes each.

    `bad_words`: texts that the output must not contain, as they encode to tokens, with or without a blank before.

    `stop`: strings that end the turn, left out of its text unless `include_stop` is set. `stop_regex`: regular
    expressions that end it as soon as one matches, so `[0-9]+` ends it at the first digit. `stop_ids`: token ids that
    end it, besides the model's own unless `ignore_eos`. Nothing ends the turn before `min_new_tokens`.

    `logprobs` and `input_logprobs` n: log-probabilities of every output or input token, and of the n likeliest in its
    place; `logprob_ids` are more tokens to show there. `priority`: higher runs first; the session's if not given.
    `grammar`: the form of the output, a `Grammar` or an object with one field: `json_schema`, `json_object` (`True`),
    `regex`, `choice` (strings), `ebnf` or `lark`. `queue_timeout` and `timeout`: seconds within which the turn must
    have started, and ended. `expect_within`: seconds after its end within which the session's next turn is expected,
    such as the time that its tools take; the session's memory is kept, or brought back, until then.

    `prediction`: text that the output will largely repeat; where it does, several tokens are computed at once.
    `speculate` `False`: none is guessed.
    """

    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    allowed_ids: Sequence[int]
    stop: str | Sequence[str]
    stop_regex: str | Sequence[str]
    include_stop: bool
    stop_ids: Sequence[int]
    ignore_eos: bool
    priority: int | None
    queue_timeout: float | None
    timeout: float | None
    expect_within: float | None
    min_new_tokens: int
    logprobs: int | None
    input_logprobs: int | None
    logprob_ids: Sequence[int]
    prediction: str
    speculate: bool
    grammar: Grammar | Mapping[str, Any] | None
    bad_words: Sequence[str]


class ChatOptions(TurnOptions, total=False):
    """Options of a turn as callers give them: those of `TurnOptions`, and the tools that its answer may call.

    `tools`: functions, each with `name` and optionally `description` and `parameters`, a JSON schema. They become part
    of a session's history with its first messages. `tool_choice`: "auto" (the default), "none", or a choice forced by a
    grammar: "required", or an object with the `name` of the function to call. `parallel_tool_calls` `False`: at most
    one call. With `tools`, even an empty list, the answer is parsed into text, reasoning and calls.
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None


TOOL_OPTIONS = tuple(name for name in ChatOptions.__annotations__ if name not in TurnOptions.__annotations__)


class RemoteOptions(ChatOptions, total=False):
    """Options of a turn on a server: those of `ChatOptions` and three more.

    `if_version`: the version that the session must have; otherwise the turn is refused with `VersionMismatch`.
    `if_busy`: while another turn of the session is open, "reject" (the default) refuses this one, "queue" waits.
    `on_disconnect`: "abort" (the default) rolls back a turn whose connection breaks. With "continue" the turn goes on:
    its stream reconnects and misses nothing, and a caller who drops the stream leaves the turn running.
    """

    if_version: int | None
    if_busy: Literal["reject", "queue"]
    on_disconnect: Literal["abort", "continue"]


def turn_params(options: TurnOptions, marks: tuple[tuple[str, int], ...] = ()) -> TurnParams:
    """Returns checked options. `marks`: as in `TurnParams`. Raises `InvalidRequest` for unknown options and for values
    out of range."""
    unknown = options.keys() - OPTIONS.keys()
    if unknown:
        raise InvalidRequest(f"unknown turn options {sorted(unknown)}; allowed: {sorted(OPTIONS)}")
    rest: dict[str, Any] = dict(options)
    sampling: dict[str, Any] = {name: rest.pop(name) for name in OF_SAMPLING & rest.keys()}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _pairs(sampling["logit_bias"])
    if rest.get("grammar") is not None:
        rest["grammar"] = Grammar.of(rest["grammar"])
        if rest.get("stop_ids") and rest.get("min_new_tokens"):
            raise InvalidRequest(
                "min_new_tokens with stop_ids and a grammar, which may allow only a stop id; allowed: two of them",
                param="min_new_tokens",
            )
    return TurnParams(
        sampling=Sampling(**sampling),
        stop_ids=rest.pop("stop_ids", ()),
        stop=_texts("stop", rest.pop("stop", ())),
        stop_regex=_texts("stop_regex", rest.pop("stop_regex", ())),
        marks=marks,
        **rest,
    )


def _texts(name: str, given: object) -> tuple[str, ...]:
    """Returns one string or several as a tuple."""
    return (given,) if isinstance(given, str) else items(name, given, "a string or a list of strings")


def _pairs(logit_bias: object) -> tuple[tuple[int, float], ...]:
    """Returns the entries of a mapping, or of a collection of pairs."""
    pairs = logit_bias.items() if isinstance(logit_bias, Mapping) else logit_bias
    allowed = "a mapping from token ids to numbers, or pairs"
    return tuple(items("a logit_bias entry", pair, "a pair") for pair in items("logit_bias", pairs, allowed))
