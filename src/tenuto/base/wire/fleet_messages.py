"""Requests of the edge to the engine that only a fleet has: about owners, moves, and objects that replicas share."""

from __future__ import annotations

import msgspec

from tenuto.base.fleet_views import FleetView, Membership, MovesView, OwnedSession, OwnerView, Place, TenantUse
from tenuto.base.objects import ItemPage, ObjectEdit, ObjectKey, ObjectsUse, StoredObject
from tenuto.base.views import SessionPage, Ticket
from tenuto.base.wire.moves import StateEnd, StateOffer, StatePiece, Surplus
from tenuto.base.wire.request import OfSession, Request


class Locate(OfSession[Place], frozen=True, kw_only=True):
    """Say which replica of the fleet owns a session. If its owner's lease has ended, the replica that receives this
    takes it over first."""


class FindOwner(OfSession[OwnerView], frozen=True, kw_only=True):
    """Say which replica of the fleet owns a session, without taking it over."""


class GetFleet(Request[FleetView], frozen=True, kw_only=True):
    """Describe the fleet."""


class CheckLease(Request[bool], frozen=True, kw_only=True):
    """Say whether this replica's lease has not ended, so that it may own sessions."""


class Enter(Request[Membership], frozen=True, kw_only=True):
    """Say which replica of the fleet this is."""


class ListUnowned(Request[SessionPage], frozen=True, kw_only=True):
    """List up to `limit` sessions of `tenant` after id `after` which no live replica of the fleet owns, by id."""

    tenant: str
    after: str
    limit: int


class BeginMove(OfSession[StateOffer], frozen=True, kw_only=True):
    """Begin to move a session to another replica, and return the offer for that one. `move`: a unique name, by which
    the other requests refer to it. `relieves`: what this replica has too much of; the other one refuses the session if
    it would end up with more. The session stays in use."""

    move: str
    relieves: Surplus | None = None


class CopyMove(Request[list[StatePiece]], frozen=True, kw_only=True):
    """Return copies of units that were not copied yet and do not change any more. May be empty."""

    move: str


class HoldMove(Request[StateEnd], frozen=True, kw_only=True):
    """Hold the session, and return what is left to send. Its open turn reports no more until `SettleMove`."""

    move: str


class SettleMove(Request[bool], frozen=True, kw_only=True):
    """End a move. `gone`: another replica is the owner, and the session leaves. Otherwise it continues here; if its
    owner may have changed (`asked`), only once the database shows that it has not, and no longer can. Answers whether
    the session is still here."""

    move: str
    gone: bool = False
    asked: bool = False


class ListOwned(Request[list[OwnedSession]], frozen=True, kw_only=True):
    """List the sessions that this replica owns, of all tenants."""


class GiveUpSession(OfSession[None], frozen=True, kw_only=True):
    """Give up an idle session, so that any replica may claim it, and use its saved state. Unless `unsaved`,
    refused with `SessionBusy` until all of its state is saved, if this replica saves state."""

    unsaved: bool = False


class EraseTraces(OfSession[list[str]], frozen=True, kw_only=True):
    """Overwrite what is left here of a session that another replica has erased. Answered with the parts that could not
    be overwritten, and why."""


class ReserveMove(Request[None], frozen=True, kw_only=True):
    """Reserve room for a session of another replica that moves here."""

    move: str
    offer: StateOffer


class PutMove(Request[None], frozen=True, kw_only=True):
    """Take in units of its state."""

    move: str
    piece: StatePiece


class TakeMove(Request[Ticket], frozen=True, kw_only=True):
    """Take in the rest, and become the session's owner. The open turn continues here, and deltas follow as after
    `StartTurn`. The answer is that turn's ticket; its number is 0 without a turn."""

    move: str
    end: StateEnd


class DropMove(Request[None], frozen=True, kw_only=True):
    """Give up the room of a move; unknown moves are fine."""

    move: str


class TellLoad(Request[dict[str, TenantUse]], frozen=True, kw_only=True):
    """Report the state of this replica's edge to the fleet: the number of open turns, whether it is `draining`, and its
    moves. `tenants`: the turns here of each tenant with limits. Answered with the known use of these tenants at other
    replicas."""

    open_turns: int
    draining: bool
    moves: MovesView
    tenants: dict[str, TenantUse] = msgspec.field(default_factory=dict)


class FindObject(Request[StoredObject | None], frozen=True, kw_only=True):
    """Return an object without its items, or `None` if it does not exist."""

    key: ObjectKey


class ListObjects(Request[list[StoredObject]], frozen=True, kw_only=True):
    """Return a tenant's objects of one kind without their items, the oldest first. `most`: at most so many."""

    tenant: str
    kind: str
    most: int | None = None


class CountObjects(Request[ObjectsUse], frozen=True, kw_only=True):
    """Count a tenant's objects of one kind."""

    tenant: str
    kind: str


class ListItems(Request[ItemPage | None], frozen=True, kw_only=True):
    """Return at most `most` items of the list `part` of an object, after the one named `after`; `None` if the object
    does not exist."""

    key: ObjectKey
    part: str
    most: int
    after: str | None = None
    newest_first: bool = False


class EditObject(Request[bool], frozen=True, kw_only=True):
    """Change an object, and answer once that is durable. Answers whether it was changed; it is not if it has another
    revision than expected. May be repeated unchanged if the outcome is unknown."""

    key: ObjectKey
    edit: ObjectEdit


class ListAbandoned(Request[list[ObjectKey]], frozen=True, kw_only=True):
    """Return the objects of one kind, of all tenants, with a `worker` whose lease has ended."""

    kind: str
