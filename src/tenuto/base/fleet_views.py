"""Views of a fleet: its replicas, the sessions that they own, and the use of its tenants."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tenuto.base.turns import TurnState
from tenuto.base.views import SessionKey, View


class OwnedSession(View, frozen=True, kw_only=True):
    """A session that a replica owns. `turn`: the state of its open turn. `units`: the number that its state takes, in
    any tier. `share`: the largest share of a pool's units that its state takes on the device. `rested`: seconds since
    its last turn ended."""

    tenant: str
    session: str
    turn: TurnState | None
    units: int
    share: float
    rested: float
    pinned: bool

    @property
    def idle(self) -> bool:
        """Whether no turn is open."""
        return self.turn is None

    @property
    def key(self) -> SessionKey:
        """The key of the session."""
        return self.tenant, self.session


class MovesView(View, frozen=True, kw_only=True):
    """The moves of sessions from one replica to others. `under_way`: the address to which each session moves. `done`,
    `failed`: the numbers of moves that have ended so."""

    under_way: dict[str, str] = msgspec.field(default_factory=dict)
    done: int = 0
    failed: int = 0


class TenantUse(View, frozen=True, kw_only=True):
    """A tenant's use of what is limited in a fleet as a whole; see `config.Limits`."""

    turns: int = 0
    queued: int = 0
    sessions: int = 0
    pinned: int = 0
    tokens: int = 0
    journal_bytes: int = 0

    def __add__(self, other: TenantUse) -> TenantUse:
        return TenantUse(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    def __sub__(self, other: TenantUse) -> TenantUse:
        """Returns the differences, with 0 for negative ones."""
        return TenantUse(
            **{name: max(0, getattr(self, name) - getattr(other, name)) for name in self.__struct_fields__}
        )


Uses = Mapping[str, TenantUse]
"""The use of tenants, by their names."""


class ReplicaLoad(View, frozen=True, kw_only=True):
    """The load of a replica, which it sends with its heartbeats. `running`, `waiting`: the numbers of its turns.
    `used`: the largest share of a pool's units that sessions and turns hold. `open_turns`: the number that its clients
    wait for, including those that run on another replica. `draining`: whether it takes nothing new, and its sessions
    move to others."""

    running: int = 0
    waiting: int = 0
    used: float = 0.0
    open_turns: int = 0
    draining: bool = False
    moves: MovesView = MovesView()


class ReplicaView(View, frozen=True, kw_only=True):
    """A replica of a fleet. `live`: whether its lease has not ended. `idle_seconds`: since its last heartbeat, by the
    database's clock. `sessions`: the number that it owns. `empty`: whether it is draining, owns no session,
    and has no client that waits for a turn. The other fields are those of `ReplicaLoad`."""

    replica: int
    url: str
    live: bool
    idle_seconds: float
    lease_seconds: float
    sessions: int
    running: int = 0
    waiting: int = 0
    used: float = 0.0
    open_turns: int = 0
    draining: bool = False
    empty: bool = False
    moves: MovesView = MovesView()


class Place(View, frozen=True, kw_only=True):
    """Where a session of a fleet is. `exists`: whether a session has this name. `url`: of the replica that owns it;
    `None` if the answering replica owns it, or no session has this name. `begun`: the request of a turn that its last
    owner had accepted, as a `StartTurn` in MessagePack; named once, after this replica has become the owner."""

    exists: bool
    url: str | None = None
    begun: bytes | None = None


class OwnerView(View, frozen=True, kw_only=True):
    """The owner of a session of a fleet. `url`: of the replica that owns it; `None` if its owner's lease has ended, or
    the session does not exist."""

    session: str
    url: str | None


class FleetView(View, frozen=True, kw_only=True):
    """A fleet, as its replica number `replica` sees it in the database."""

    replica: int
    replicas: list[ReplicaView]


class Membership(View, frozen=True, kw_only=True):
    """The membership of a replica, for its edge. `replica`: its number. `secret`: shared by the fleet's replicas.
    `lease`: see `ReplicaView.lease_seconds`."""

    replica: int
    secret: str
    lease: float
