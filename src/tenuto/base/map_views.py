"""The map of an engine, in parts: who holds which units, and what open turns do. No part has any text."""

from __future__ import annotations

from typing import Literal

from tenuto.base.views import AuditReport, View

Phase = Literal["drafting", "queued", "restoring", "sharing", "prefill", "decode", "paused", "preempted"]
"""What an open turn does. `restoring`: its session's state is being copied to the device; `sharing`: another turn
computes the beginning that both have; `paused`: it gave up its row and kept its memory; `preempted`: it gave up
both."""


class MappedUnits(View, frozen=True, kw_only=True):
    """Units of one holder: `pool` is an index of `MapPart.pools`, `kind` that of the holder (`HolderKind`), and `units`
    the bytes of int32 numbers."""

    pool: int
    kind: str
    units: bytes


class MappedTurn(View, frozen=True, kw_only=True):
    """An open turn. `why`: the reason for its phase, for people; may be empty. `cached`: -1 until it has run.
    `arrived`: when it was submitted, on the engine's clock."""

    number: int
    phase: Phase
    why: str
    prompt: int
    cached: int
    computed: int
    output: int
    limit: int
    arrived: float


class MappedSession(View, frozen=True, kw_only=True):
    """A session with all that it holds. `number`: its name on the map, which no other session gets. `parent`: that of
    the open session it was forked from; `forked`: the tokens that it had then. `listed`: clients see it in lists.
    `turns`: the number of its turns; `recent`: input and output tokens of the last ones. `parked`: tokens whose state
    is in `tier`; `saved`: those whose state is on disk for the next process. `since`: when its last turn ended, on the
    engine's clock."""

    number: int
    tenant: str
    session: str
    state: str
    listed: bool
    pinned: bool
    version: int
    parent: int | None
    forked: int
    turns: int
    recent: list[tuple[int, int]]
    tokens: int
    computed: int
    parked: int
    tier: str
    saved: int
    since: float
    arriving: bool
    turn: MappedTurn | None
    held: list[MappedUnits]


class MappedPool(View, frozen=True, kw_only=True):
    """A pool. `slots`: token slots of a unit. `unit_bytes`: 0 if it is not known. `leased`: one bit a unit, the first
    one in the highest bit of the first byte. `limbo`: the units in limbo, as the bytes of int32 numbers."""

    name: str
    capacity: int
    slots: int
    unit_bytes: int
    free: int
    leased: bytes
    limbo: bytes


class MapPart(View, frozen=True, kw_only=True):
    """The changes on the map since the last look, or the first of them if time was short (`more`). `now`: the
    engine's clock, in seconds. `sessions`: those that may have changed; `gone`: the numbers of those that no longer
    hold anything. `computed`, `generated`: tokens since the start; `busy`: the seconds that the steps took. `audit`:
    the last complete recount, `audited` seconds ago."""

    now: float
    more: bool
    steps: int
    open: int
    running: int
    rows: int
    queued: int
    computed: int
    generated: int
    busy: float
    restored: int
    tiers: dict[str, int]
    tier_moves: dict[str, int]
    pools: list[MappedPool]
    sessions: list[MappedSession]
    gone: list[int]
    audit: AuditReport | None
    audited: float


class TracedTurn(View, frozen=True, kw_only=True):
    """A turn that was open during a trace. `arrived`: when it was submitted. `ended`: the reason of its end; empty if
    it was still open. `session`: its session's id, and `tenant` the session's tenant."""

    number: int
    session: str
    tenant: str
    arrived: float
    prompt: int
    cached: int
    output: int
    ended: str


class TracedStep(View, frozen=True, kw_only=True):
    """A step: its number, and when it began and ended. `turns`: for each row, the turn's number, the tokens computed,
    and how many of them were sampled after."""

    step: int
    began: float
    ended: float
    turns: list[tuple[int, int, int]]


class TraceView(View, frozen=True, kw_only=True):
    """The steps between two moments, and the turns in them or in the queue. Times are seconds of the engine's clock;
    `wall` is the time of `began` since the epoch. `more`: there were too many steps, and the last ones are missing."""

    began: float
    ended: float
    wall: float
    more: bool
    steps: list[TracedStep]
    turns: list[TracedTurn]
