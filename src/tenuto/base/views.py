"""Views of an engine: descriptions of its model, sessions and turns, shared by engine, messages, edge and clients."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec

from tenuto.base.config import EngineConfig
from tenuto.base.embedding import EmbeddingHabits
from tenuto.base.fill import FillTokens
from tenuto.base.tools.answers import Reading
from tenuto.base.tools.definitions import ModelHabits
from tenuto.base.turns import Delta, TurnState
from tenuto.base.wire.bodies import named

SessionKey = tuple[str, str]
"""A session's tenant, and its id among the sessions of that tenant."""


class SessionState(StrEnum):
    """States of a session. One that is closing lets its running turn end."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


StateFilter = Literal["open", "closing", "idle", "drafting", "queued", "running", "preempted"]
"""Sessions in this state, or whose open turn is in this state; `idle`: without an open turn."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session at one moment. `turn`: the state of its open turn, if any. `version` counts commits and rewinds. The
    state of the first `computed` of its `tokens` tokens is in memory; `limit` is the maximum of `tokens`.
    `idle_seconds`: time since its last turn ended, 0 while one is open; ignored by `==`. `memory`: units that the
    session and its turn need, by group; `cached`: units of further checkpoints, which only save work. `adapter`: its
    adapter's name. `expected_in`: seconds until its next turn is expected, negative if it is late; ignored by `==`."""

    session_id: str = field(metadata=named("id"))
    state: SessionState
    turn: TurnState | None
    version: int
    turns: int
    tokens: int
    computed: int
    context_left: int
    limit: int = field(metadata=named("max_tokens"))
    priority: int
    ttl: float | None
    idle_seconds: float = field(compare=False)
    memory: Mapping[str, int] = field(hash=False)
    metadata: Mapping[str, str] = field(hash=False)
    cached: Mapping[str, int] = field(default_factory=dict, hash=False)
    pinned: bool = False
    adapter: str | None = None
    expected_in: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Compacted:
    """A session after its compaction. `summary`: the text that the model wrote, if it did. `computed` and `generated`:
    the numbers of tokens computed and generated for the compaction."""

    info: SessionInfo
    summary: str | None
    computed: int = field(metadata=named("computed_tokens"))
    generated: int = field(metadata=named("completion_tokens"))


SHARED = "shared"


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Units of one pool: `capacity` = `free` + `in_flight` (units in limbo) + `leased`; `by_holder` counts leased units
    by the kind of their holder. A unit with several holders counts once, as `SHARED`. `cached`: leased units held only
    by checkpoints that save work but are not needed."""

    name: str
    capacity: int
    free: int
    in_flight: int
    leased: int
    by_holder: Mapping[str, int] = field(default_factory=dict)
    cached: int = 0


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of a clean audit: the pools, the number of holders with a lease, and the number of their leases."""

    pools: tuple[PoolReport, ...]
    holders: int
    leases: int

    def __str__(self) -> str:
        """Formats the report as one line with every unit accounted for, by holder."""
        parts = []
        for pool in self.pools:
            held = ", ".join(f"{name} {count}" for name, count in sorted(pool.by_holder.items()))
            rest = f", in flight {pool.in_flight}" if pool.in_flight else ""
            parts.append(f"{pool.name}: {pool.capacity} units = free {pool.free}{rest}{', ' if held else ''}{held}")
        return f"every unit accounted for ({self.holders} holders, {self.leases} leases) | " + " | ".join(parts)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the values that answer requests; HTTP responses are made from them."""


class TokenizerView(View, frozen=True, kw_only=True):
    """A tokenizer. `bos` and `eos`: the texts of the control tokens that begin and end texts. `chat_template`: its
    source. Each is `None` if the tokenizer lacks it."""

    vocab_size: int
    bos: str | None
    eos: str | None
    chat_template: str | None


class ModelView(View, frozen=True, kw_only=True):
    """The model that is served, and the settings it runs with. `max_context`: the model's own limit; `context_length`:
    the engine's. `compute`: the code and device that compute, for people. `units`: pool sizes by name;
    `capacity_tokens`: token slots of the smallest paged pool, or 0 if no pool has pages. `guess_bytes`: memory for the
    inputs of guessed tokens, which recurrent layers keep. `adapters`: those loaded at the start."""

    model: str
    path: str
    vocab_size: int
    context_length: int
    max_context: int
    compute: str
    page_size: int
    capacity_tokens: int
    units: dict[str, int]
    guess_bytes: int = 0
    adds_bos: bool
    bos_id: int | None
    eos_ids: list[int]
    fill: FillTokens | None = None
    has_text: bool
    has_chat: bool
    habits: ModelHabits = ModelHabits()
    embedding: EmbeddingHabits
    pid: int
    config: EngineConfig
    adapters: list[AdapterView] = []


class WeightsView(View, frozen=True, kw_only=True):
    """The weights in use."""

    weight_version: str


class AdapterView(View, frozen=True, kw_only=True):
    """A loaded adapter: its name, the directory it was read from, and the digest of its weights."""

    name: str
    path: str
    digest: str


class SessionPage(View, frozen=True, kw_only=True):
    """A page of sessions in the order of their ids. `more`: whether others follow. A page that becomes large ends
    early, but only the last one can be empty."""

    sessions: list[SessionInfo]
    more: bool


class Listing(View, frozen=True, kw_only=True):
    """Sessions of a server in the order of their ids. `turns`: the ids of their open turns, by session. `more`: whether
    others follow."""

    sessions: list[SessionInfo]
    turns: dict[str, str]
    more: bool


@dataclass(frozen=True, slots=True)
class Record:
    """A committed turn; its texts are `None` without a tokenizer. `start`: the position of its first token in the
    history. `resume_cost`: the number of tokens to compute again, with memory as it is now, if the session is cut or
    forked at the end of this turn."""

    number: int
    start: int
    resume_cost: int
    input_tokens: list[int]
    output_tokens: list[int]
    input_text: str | None
    output_text: str | None


class RecordPage(View, frozen=True, kw_only=True):
    """A page of committed turns in order. `more`: as in `SessionPage`."""

    records: list[Record]
    more: bool


class Ticket(View, frozen=True, kw_only=True):
    """An accepted turn. `history`: committed tokens before it. `prompt` and `text` are set only if an echo was
    requested. `birth`: that of its session, which no other session of the same id has; 0 if unknown."""

    turn: int
    session: str
    history: int
    prompt_tokens: int
    max_new_tokens: int
    version: int
    prompt: list[int] = []
    text: str | None = None
    birth: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """The counts that answers to clients contain."""
        return {"prompt_tokens": self.prompt_tokens, "max_new_tokens": self.max_new_tokens}


class KeptTurn(View, frozen=True, kw_only=True):
    """A committed turn that was started with an idempotency key, kept to answer repeated requests. `digest`: the digest
    of the request. `name`, `reading`, `about`: see `messages.StartTurn`. `omitted`: the size in bytes if the answer
    was too large to be kept, else 0; then `output` has only the turn's result, and `ticket` has no prompt."""

    key: str
    digest: bytes
    name: str
    ticket: Ticket
    output: Delta
    omitted: int = 0
    reading: Reading | None = None
    about: bytes = b""


class FoundTurn(View, frozen=True, kw_only=True):
    """The turn of an idempotency key; `None` if it was not committed or is no longer kept. `birth`: that of the
    session, as in `Ticket`; `None` if there is no session."""

    turn: KeptTurn | None = None
    birth: int | None = None


@dataclass(frozen=True, slots=True)
class Transition:
    """A counted operation on a session or turn and, where it matters, the state in which it found the turn; `idle` if
    there was no turn."""

    operation: str
    state: str | None = None

    def __str__(self) -> str:
        return self.operation if self.state is None else f"{self.operation} {self.state}"


class Sharing(View, frozen=True, kw_only=True):
    """A session that still has state or tokens of an erased one, of which it is a fork or has the same beginning:
    `tokens` at the beginning of both, `units` of memory by group, and `copies` in host memory or on disk."""

    session: str
    tokens: int
    units: dict[str, int]
    copies: int


class Erased(View, frozen=True, kw_only=True):
    """The receipt for an erased session of `tokens` tokens. `held`: the units that it and its turn held, by group, of
    which those that `shared` names stay until their last holder goes. `overwritten`: units on the device, by group,
    which are all that were free and had been used, so also those that it had given back before. `copies`: overwritten
    in host memory. `rows`: overwritten in files of the disk tier. `journal_rows`: removed and overwritten. `answers`:
    ended turns that the server kept for returning readers. `shared`: the sessions that still have a part of it.
    `failed`: what could not be overwritten or removed, and why; empty if nothing is left."""

    session: str
    tokens: int
    held: dict[str, int]
    overwritten: dict[str, int]
    copies: int
    rows: int
    shared: list[Sharing]
    failed: list[str]
    journal_rows: int = 0
    answers: int = 0


class SharedTierView(View, frozen=True, kw_only=True):
    """The use of a store that the replicas of a fleet share. `moved`: bytes since the start, by direction; `failures`:
    requests that failed, by what they were to do. `waiting`: sessions whose saved state has yet to reach it, or has yet
    to be removed."""

    moved: dict[str, int] = {}
    failures: dict[str, int] = {}
    waiting: int = 0


class Stats(View, frozen=True, kw_only=True):
    """Counts since the start, and the present state. `accepted_tokens` and `rejected_tokens`: guesses that became
    output, and others that were computed, by source. `recomputed`: tokens computed again, by reason. `replayed`: tokens
    in memory that rewinds and forks have to compute again, since no checkpoint was nearer. `prefix_lookups`: turns that
    lacked at least a page, by the outcome of the search for it in the memory of others; `prefix_tokens`: the tokens
    found, by the state of their owner. `tiers`: bytes that parked sessions hold, by tier; `parked`: the number of
    parked sessions; `restored`: sessions restored since the start; `tier_moves`: units moved, by destination;
    `tier_failures`: failed copies, writes and reads, by cause. `snapshots`: sessions that an earlier process saved, by
    whether their memory was restored. `saved`: sessions with state on disk for the next process; `unsaved`: those that
    wait for it; `saved_bytes`: bytes written for it. `held_tokens`: committed tokens of open sessions, by tenant.
    `shared`: the use of the fleet's shared tier."""

    sessions: int
    running: int
    queued: int
    steps: int
    transitions: dict[Transition, int]
    pools: list[PoolReport]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    computed_tokens: int
    accepted_tokens: dict[str, int]
    rejected_tokens: dict[str, int]
    recomputed: dict[str, int]
    replayed: dict[str, int]
    prefix_lookups: dict[str, int]
    prefix_tokens: dict[str, int]
    parked: int
    restored: int
    tiers: dict[str, int]
    tier_moves: dict[str, int]
    tier_failures: dict[str, int]
    snapshots: dict[str, int]
    saved: int
    unsaved: int
    saved_bytes: int
    held_tokens: dict[str, int]
    shared: SharedTierView


def hidden_session_id() -> str:
    """Returns a new id for a session that no request of a client can name."""
    return f"~{secrets.token_hex(12)}"
