"""Plans, which describe one step as flat arrays, and the protocol of executors.

A plan is plain data: making it changes nothing. The engine makes it, and an executor carries it out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tenuto.base.config import EngineOptions
from tenuto.base.groups import MemorySpec
from tenuto.base.sampling import Candidate, Sampling, TokenLogprob

Ints = npt.NDArray[np.int32]
Singles = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
"""One bit per token: token t has bit `t % 32` of word `t // 32`."""
Bytes = npt.NDArray[np.uint8]

PREVIOUS_SAMPLE = -1
"""In `Plan.tokens`: the token that this row samples in the step submitted just before, still unknown to the planner."""

NO_SLOT = -1
"""In `StateMoves.reads`: the row starts from the zero state."""


@dataclass(frozen=True, slots=True)
class TableChanges:
    """New entries of one paged group's page table: `table[rows[i], index[i]] = pages[i]`. All int32 [changes]."""

    rows: Ints
    index: Ints
    pages: Ints


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Page copies of one paged group, done before the step computes: the first `slots[i]` token slots of page
    `sources[i]` go to page `targets[i]`. All int32 [copies]."""

    sources: Ints
    targets: Ints
    slots: Ints


@dataclass(frozen=True, slots=True)
class StateMoves:
    """For one state group and each scheduled row: the slot that is read (`NO_SLOT`: the zero state) and the slot that
    is written, which may be the same, and whether the step keeps inputs. All int32 [rows].

    The slot that is read holds the state before the row's first token, or an earlier one: then the first `absorbs[i]`
    inputs that the row's last step kept lead from it to the row's first token. The slot that is written takes the state
    after the row's last token. If `keeps[i]` is 1, it takes the state before the first instead, and the executor keeps
    what recurrent layers compute from: the inputs of the row's tokens, at most lookahead + 1.
    """

    reads: Ints
    writes: Ints
    absorbs: Ints
    keeps: Ints


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling options of a row, which replace its earlier ones.

    Token ids for penalties, int32: `prompt`, the distinct ids of history and input in any order, if there is a
    repetition penalty; `output`, the turn's output so far, if there is any penalty; else `None`. At positions before
    `masked_before`, the ids in `masked` are not sampled. `top` n requests log-probabilities of sampled tokens and of
    the n likeliest, and of the ids in `named`; `None` requests nothing. Penalties of a sample also count the guesses
    before it in its step.
    """

    sampling: Sampling
    prompt: Ints | None = field(default=None, compare=False)
    output: Ints | None = field(default=None, compare=False)
    masked: tuple[int, ...] = ()
    masked_before: int = 0
    top: int | None = None
    named: tuple[int, ...] = ()

    @property
    def edited(self) -> bool:
        """Whether logits change before a token is sampled."""
        options = self.sampling
        return bool(options.penalised or options.logit_bias or options.allowed_ids or self.masked)


@dataclass(frozen=True, slots=True)
class InputScores:
    """Input tokens to score: the log-probability of token `targets[i]` after the plan's input token `offsets[i]`, of
    the `top` likeliest tokens there, and of the tokens `named[i]`. Both arrays are int32 [scores]."""

    offsets: Ints
    targets: Ints
    top: int
    named: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class InputVectors:
    """Vectors to add up: those after the plan's input tokens `firsts[i]` to `firsts[i] + counts[i] - 1`, which belong
    to one row. A vector is the output of the model's last norm, from which logits are computed. Both int32 [sums]."""

    firsts: Ints
    counts: Ints


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that a row with a grammar may sample. `place`: the index of its first sample among all samples of the
    plan. `allowed` resolves to uint32 [samples of the row, words], a bit for every allowed token, while the step
    computes; an executor waits for it before it samples. Tokens after the last word are not allowed. If it resolves to
    `None`, any token may be sampled: the turn has left its row, or its grammar cannot continue and the turn ends."""

    place: int
    allowed: Future[Words | None]


SAMPLED = -1
"""In `PredictorWork.following`: the token that the row samples after its last one in this step."""


@dataclass(frozen=True, slots=True)
class PredictorWork:
    """The work of the model's head for multi-token prediction, which is done when the step's tokens are sampled. Both
    arrays are int32 [rows].

    `following[i]` is the token after the row's last one in this step, or `SAMPLED`. The head stores keys and values for
    all tokens of the step, in their slots. `guesses[i]` is the number of tokens that the row asks the head to guess
    after the last one that it samples and that follows right guesses. The n-th takes the place of the n-th of the
    tokens from there on, and needs its slot. The head guesses as many as there are slots in the row's pages."""

    following: Ints
    guesses: Ints


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward pass over a mixed batch of prefill chunks and decodes.

    Row `rows[i]` computes `counts[i]` tokens, at positions from `starts[i]` on; their ids are the next `counts[i]`
    entries of `tokens`. It samples after each of its last `samples[i]` tokens (0 in the middle of a prefill, 1 for a
    decode, 1 + k with k lookahead tokens, whose guesses are the last k input tokens).

    `tables` and `copies` have one entry per full or sliding memory group, `states` one per state group, each in the
    order of the memory spec. Page tables persist between steps: an executor keeps one row of pages per row id, applies
    `tables` first, then `copies`, then computes. Entries of a sliding group that lie wholly before the
    window of `starts[i]` are stale and must not be read. `sampling` lists the rows whose sampling options are new.
    `scores` and `vectors` are `None` if no row requests them. `masks` has an entry for every row with a grammar that
    samples. `adapters`, int32 [rows], is the slot of each row's adapter, and 0 for rows without one; `None` if no row
    has one. `predictor` is `None` if the executor does not predict.
    """

    step: int
    rows: Ints
    starts: Ints
    counts: Ints
    tokens: Ints
    samples: Ints
    tables: tuple[TableChanges, ...]
    copies: tuple[PageCopies, ...]
    states: tuple[StateMoves, ...]
    sampling: tuple[tuple[int, RowSampling], ...]
    scores: InputScores | None = None
    masks: tuple[TokenMasks, ...] = ()
    vectors: InputVectors | None = None
    adapters: Ints | None = None
    predictor: PredictorWork | None = None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of n tokens, see `base.sampling.TokenLogprob`: `places` int32 [n], the indices of the tokens;
    `chosen` float32 [n]; the likeliest tokens `top_tokens` int32 [n, k] and their log-probabilities `top` float32
    [n, k], in descending order. A row that requested fewer than k uses the first ones. `named` float32 [n, m]: those
    of the ids that the token's row names, at most m; a row with fewer leaves its last columns undefined."""

    places: Ints
    chosen: Singles
    top_tokens: Ints
    top: Singles
    named: Singles

    def entries(self, start: int, tokens: Sequence[int], count: int, named: Sequence[int] = ()) -> list[TokenLogprob]:
        """Returns the log-probabilities of `tokens` from entry `start` on, each with the `count` likeliest and those of
        the ids in `named`, which are the ones of the row."""
        part = slice(start, start + len(tokens))
        chosen, ids, top = self.chosen[part].tolist(), self.top_tokens[part, :count], self.top[part, :count]
        likeliest = [tuple(map(Candidate, *pair)) for pair in zip(ids.tolist(), top.tolist(), strict=True)]
        others = [tuple(map(Candidate, named, each)) for each in self.named[part, : len(named)].tolist()]
        found = zip(tokens, chosen, likeliest, others, strict=True)
        return [TokenLogprob(token, logprob, top, named=other) for token, logprob, top, other in found]


@dataclass(frozen=True, slots=True)
class Predicted:
    """Guesses of the model's head for the rows of a plan: the first `counts[i]`, int32 [rows], of `tokens[i]`, int32
    [rows, most], and their probabilities by the head, `chances`, float32 [rows, most]. `seconds`: the time that the
    head took to guess."""

    tokens: Ints
    chances: Singles
    counts: Ints
    seconds: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled tokens of a step, int32 [sum(plan.samples)], rows in plan order. `sampled`: log-probabilities of
    sampled tokens, where their rows request them, by index in `tokens`; `scored`: those of the input tokens in
    `plan.scores`; `vectors`: the sums of `plan.vectors`, float32 [sums, width of the model]; `predicted`: the head's
    guesses. Each is `None` if no row requests it."""

    tokens: Ints
    sampled: Logprobs | None = None
    scored: Logprobs | None = None
    vectors: Singles | None = None
    predicted: Predicted | None = None


class CopyFailed(Exception):
    """Units could not be copied from the device or to it."""


class Copier(Protocol):
    """Copies units between the device and host memory. Callers read no unit that a step in flight writes, and write no
    unit that it touches."""

    def unit_bytes(self, group: int) -> int:
        """The size of a unit of `group` in bytes."""

    def read_units(self, group: int, units: Ints) -> Bytes:
        """Returns copies of `units`, int32 [n], as uint8 [n, bytes a unit]. Raises `CopyFailed`."""

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        """Writes copies made by `read_units` to `units`, each uint8 [bytes a unit]. Any thread may call it while steps
        are computed and other units are written. Steps submitted after it has returned read the new contents. Raises
        `CopyFailed`."""


MemoryPart = Literal["kv_cache", "weights"]
PARTS: tuple[MemoryPart, ...] = ("kv_cache", "weights")
"""Parts of a model's memory that can be returned to the system for a time: that of all units, and the weights."""


class Weights(Protocol):
    """A model's weights, read but not yet in use, in a form private to the executor that has read them."""

    def close(self) -> None:
        """Releases the weights."""


class AdapterWeights(Protocol):
    """An adapter, read but not yet in a slot, in a form private to the executor that has read it."""

    @property
    def digest(self) -> str:
        """A digest of all that it computes with, equal only for adapters that compute the same."""


class Executor(Copier, Protocol):
    """Carries out plans in the order of their submission, up to two in flight: `collect` returns the result of the
    oldest that is not yet collected. Units that a plan newly names (new page table entries, the targets of copies, new
    state slots of a row) may be written from `submit` on, before an earlier step in flight has ended. A step submitted
    after one that fails is carried out anyway. The table changes and sampling options of both may be lost; the engine
    sends them again."""

    @property
    def spec(self) -> MemorySpec:
        """The memory groups that the model needs."""

    @property
    def layout(self) -> str:
        """Name of the arithmetic that computes units and of their arrangement in bytes. Executors with the same model,
        memory groups and layout can use each other's units."""

    @property
    def batch_invariant(self) -> bool:
        """Whether the results of a token do not depend on how tokens are cut into steps, in any bit, so that guesses
        change no output."""

    @property
    def predicts(self) -> bool:
        """Whether the model has a head for multi-token prediction. Then plans have a `predictor`."""

    @property
    def defaults(self) -> EngineOptions:
        """Options of an engine that are better for this executor than their general defaults, which they replace."""

    def prepare(self, units: tuple[int, ...], rows: int, overlap: int = 1, lookahead: int = 0) -> None:
        """Allocates memory for `units[g]` units of each group of `spec`, and page tables and kept inputs for row ids
        0 .. `rows` - 1. `overlap`: whether the caller does other work between `submit` and `collect`; with 0 `collect`
        may carry out the step. `lookahead`: the most guesses of a row in a step. Called once, before the first
        `submit`."""

    def release(self, parts: Collection[MemoryPart]) -> None:
        """Returns memory to the system. The contents of units are lost, even if only the weights are released. No step
        is in flight, and until `restore` nothing is submitted or copied."""

    def load(self, path: str | None) -> Weights:
        """Reads the weights again, or those of another model of the same shape at `path`, without putting them to use.
        Any thread may call it, at any time. Raises `InvalidRequest` if they cannot replace the present ones,
        `ModelError` or `ConfigError`."""

    def restore(self, parts: Collection[MemoryPart], weights: Weights | None, kept: Sequence[Ints] = ()) -> None:
        """Allocates the released `parts` again, and computes with `weights` from now on, which must be given if they
        are among `parts`. `kept`: units of each group whose contents stay; those of others are undefined, as are page
        tables and kept inputs. No step is in flight. Raises `ConfigError`, having
        changed nothing, if there is not enough memory."""

    def read_adapter(self, path: str) -> AdapterWeights:
        """Reads an adapter for the model from a directory. Any thread may call it, at any time. Raises `ModelError` if
        it is missing, damaged or not supported, or does not fit the model."""

    def set_adapter(self, slot: int, adapter: AdapterWeights | None) -> None:
        """Puts an adapter into a slot, counted from 1, for the rows of later plans that name it; `None` empties the
        slot. It stays there when memory is released or weights are replaced. No step in flight has a row with this
        slot."""

    def submit(self, plan: Plan) -> None:
        """Starts a step, or leaves it to `collect`, and returns at once. Failures that the plan's turns can cause are
        raised by `collect`."""

    def collect(self) -> StepResult:
        """Waits for the oldest step in flight. Raises `StepFailed` if it could not be finished."""

    def close(self) -> None:
        """Releases all resources; nothing is submitted afterwards."""
