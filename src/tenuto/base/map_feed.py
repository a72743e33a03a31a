"""The feed of the map as viewers get it: an event `map` with all of it, then `change` events. No part has any text."""

from __future__ import annotations

import msgspec

from tenuto.base.map_views import Phase
from tenuto.base.views import View

KINDS = ("turn", "session", "prefix", "checkpoint", "cached")
"""The kinds of holders that belong to sessions. A unit that several of them hold for one session counts for the
first."""

Ranges = list[int]
"""Ascending units in pairs: the first of each run, and the length of the run."""
Holding = tuple[int, int, Ranges]
"""An index of `About.pools`, one of `KINDS`, and the units."""


class ShownTurn(View, frozen=True, kw_only=True):
    """An open turn; see `MappedTurn`."""

    n: int
    phase: Phase
    why: str
    prompt: int
    cached: int
    computed: int
    output: int
    limit: int
    arrived: float


class ShownSession(View, frozen=True, kw_only=True, omit_defaults=True):
    """A session with all that it holds; see `MappedSession`."""

    n: int
    id: str
    tenant: str
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
    held: list[Holding]
    turn: ShownTurn | None = None


class ShownPool(View, frozen=True, kw_only=True):
    """The fields of a pool that change. `other`: units that no known session holds."""

    free: int
    limbo: Ranges
    other: Ranges


class ShownAudit(View, frozen=True, kw_only=True):
    """The last complete recount, `age` seconds ago. `pools`: units by the kind of their holders, by the pool's name."""

    holders: int
    leases: int
    pools: dict[str, dict[str, int]]
    age: float


class OwnHead(View, frozen=True, kw_only=True):
    """The totals that tenants see. `t`: the engine's clock, in seconds. `more`: sessions are still to be described."""

    t: float
    more: bool


class WholeHead(OwnHead, frozen=True, kw_only=True):
    """The totals that admins see; see `MapPart`. `moves`: units that moved to each tier."""

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
    moves: dict[str, int]
    pools: list[ShownPool]
    audit: ShownAudit | None


class PoolAbout(View, frozen=True, kw_only=True):
    """The fields of a pool that never change; see `MappedPool`."""

    name: str
    capacity: int
    slots: int
    unit_bytes: int


class About(View, frozen=True, kw_only=True):
    """The server and its viewer. `tenant`: `None` if the server has no keys. `admin`: the viewer sees all sessions."""

    model: str
    compute: str
    tenant: str | None
    admin: bool
    pools: list[PoolAbout]


class Change(View, frozen=True, kw_only=True):
    """What has changed. `head`: a `WholeHead` or an `OwnHead`, as `About.admin` says. `gone`: numbers of sessions."""

    head: msgspec.Raw
    sessions: list[ShownSession]
    gone: list[int] = msgspec.field(default_factory=list)


class Picture(Change, frozen=True, kw_only=True):
    """All of the map."""

    about: About
