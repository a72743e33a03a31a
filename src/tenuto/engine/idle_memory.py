"""The memory of idle sessions off the device, as the rest of the engine sees it: with tiers, or without any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tenuto.base.errors import InvariantError
from tenuto.base.wire.state_file import CopiedState
from tenuto.memory.pool import Lease
from tenuto.memory.rows import Longs
from tenuto.memory.tiers.lent import LentUnits
from tenuto.sched.admission import Restoring
from tenuto.session.session import Session
from tenuto.session.turn import Turn


@dataclass(frozen=True, slots=True)
class TierCounts:
    """`parked` sessions now, sessions ever `restored`, bytes `used` by tier, units ever `moved` by target, and
    `failures` by cause."""

    parked: int = 0
    restored: int = 0
    used: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)


class IdleMemory(Restoring, Protocol):
    """Parks sessions off the device and restores them when their turns start. See `Parking`."""

    @property
    def copying(self) -> bool:
        """Whether copies to the device are under way, which will free units or let turns continue."""

    @property
    def counts(self) -> TierCounts: ...

    def park(self, session: Session) -> bool:
        """Copies what the session keeps, which is about to be released. Returns whether all of it is parked now."""

    def lend(self, session: Session) -> LentUnits | None:
        """Lends the parked memory of a session, to be read by another thread until `take_back`."""

    def take_back(self, lent: LentUnits) -> None:
        """Ends a loan, whether the memory was read or not."""

    def position(self, session: Session) -> int:
        """Returns the number of tokens whose memory is parked."""

    def hold(self, session: Session, state: CopiedState) -> bool:
        """Parks a session with state from elsewhere. Returns False if there is no room."""

    def changed(self, session: Session, kept: int) -> None:
        """Only the first `kept` tokens of the session's history are unchanged."""

    def fork(self, parent: Session, child: Session) -> None:
        """The child's history is the beginning of its parent's."""

    def forget(self, session: Session) -> None:
        """The session is closed, or its parked memory is not to be restored."""

    def restore(self, turn: Turn, slots: tuple[Lease, ...]) -> None:
        """Begins to restore what `plan` found for the turn, in `slots`, which were acquired for the turn to start with,
        and in free units. The session has it at once, but if the turn `awaits` it, it is empty until `arrivals` returns
        the turn."""

    def awaits(self, turn: Turn) -> bool:
        """Whether the turn has to wait, since its session's memory is arriving."""

    def begun(self, turn: Turn) -> None:
        """The waiting turn has begun on its session's memory: no other turn may, until that has arrived."""

    def arrivals(self) -> Iterable[tuple[Turn, bool]]:
        """Returns the turns whose sessions' memory has arrived since the last call or, `False`, has failed to: then it
        has to be given up and computed again."""

    def give_up(self, turn: Turn) -> None:
        """A waiting turn has left its row and released its memory: the session has none. What is parked stays."""

    def on_copied(self, told: Callable[[], None]) -> None:
        """Has `told` called, in any thread, when copies have ended that a turn may wait for."""

    def note_computed(self, tokens: int, seconds: float) -> None:
        """Notes what computing tokens costs, which restoring them would save."""

    def become(self, identity: str) -> None:
        """The weights have been replaced; `identity` is that of what they compute. Nothing may be parked."""

    def finish(self) -> None:
        """Waits for copies under way; no turn waits for them."""

    def audit(self) -> None:
        """Raises `InvariantError` if anything parked is not as it should be."""

    def close(self, *, keep: bool) -> None:
        """Releases the disk tier, and unless told to `keep` them removes its files."""


class NoParking:
    """The device is all there is: a session that leaves it keeps only its tokens, nothing is ever restored, and no turn
    waits for memory. What only follows a restore raises `InvariantError`."""

    restores = False
    copying = False
    counts = TierCounts()

    def park(self, session: Session) -> bool:
        return False

    def lend(self, session: Session) -> None:
        return None

    def take_back(self, lent: LentUnits) -> None:
        raise InvariantError("nothing is parked, so nothing was lent")

    def position(self, session: Session) -> int:
        return 0

    def hold(self, session: Session, state: CopiedState) -> bool:
        return False

    def changed(self, session: Session, kept: int) -> None:
        """Nothing of it is parked."""

    def fork(self, parent: Session, child: Session) -> None:
        """Nothing of the parent is parked."""

    def forget(self, session: Session) -> None:
        """Nothing of it is parked."""

    def plan(self, turn: Turn) -> int:
        return 0

    def units(self, turn: Turn, *, alone: bool = False) -> Longs:
        raise InvariantError(f"nothing is parked that {turn.name} could begin with")

    def restore(self, turn: Turn, slots: tuple[Lease, ...]) -> None:
        """Nothing of its session is parked."""

    def awaits(self, turn: Turn) -> bool:
        return False

    def begun(self, turn: Turn) -> None:
        raise InvariantError(f"{turn.name} waits for nothing")

    def arrivals(self) -> tuple[()]:
        return ()

    def give_up(self, turn: Turn) -> None:
        raise InvariantError(f"{turn.name} waits for nothing")

    def on_copied(self, told: Callable[[], None]) -> None:
        """Nothing is ever copied."""

    def note_computed(self, tokens: int, seconds: float) -> None:
        """Computing has no alternative, so its cost decides nothing."""

    def become(self, identity: str) -> None:
        """No copy has an identity."""

    def finish(self) -> None:
        """No copy is under way."""

    def audit(self) -> None:
        """Nothing is parked, so nothing can be wrong."""

    def close(self, *, keep: bool) -> None:
        """There is no disk tier."""
