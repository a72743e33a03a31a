"""A checkpoint: leases on a resumable position, shared by all sequences that resume there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tenuto.base.errors import InvariantError
from tenuto.memory.pool import HolderKind, Lease


class Checkpoint:
    """What resuming at `position` needs in every group but full attention, whose pages the sequence itself holds.

    `parts[g]` is the lease in group g of the memory spec: a sliding window's pages, a state slot, or `None` for full
    attention. It does not change until its end, when it holds nothing. Any number of sequences may refer to it; each
    unit is held once for all of them.

    When a second sequence refers to it, it becomes `shared`: the floors of its units then protect it. Before that, the
    only sequence that refers to it may be cut back and overwrite it.

    Invariant: `references` counts the sequences that refer to it, and `pins` those that need it; it is in the cache if
    it has references and no pins. It ends with its last reference, or earlier when it is evicted, which `evicted` tells
    those that still refer to it. Both counts are written by the cache, and what is said of its place among others by
    `Thinning`.
    """

    __slots__ = (
        "_maker",
        "below",
        "branches",
        "ended",
        "evicted",
        "needed_at",
        "parts",
        "pins",
        "position",
        "reach",
        "reached",
        "references",
        "shared",
    )

    def __init__(self, position: int, maker: str, below: Checkpoint | None = None) -> None:
        """`maker`: the name of the session or turn that made it. `below`: the last one before it in its sequence."""
        self.position = position
        self.parts: list[Lease | None] = []  # filled by whoever makes it, once
        self.references = 0
        self.pins = 0
        self.shared = False  # written by `share`
        self.evicted = False
        self.below = below  # or one that has ended since, above it
        self.ended = False
        self.branches = 0
        self.reach = position
        self.reached = 0
        self.needed_at = 0
        self._maker = maker

    @property
    def holder_kind(self) -> HolderKind:
        """`cached` if nobody needs it: it only saves work."""
        return "checkpoint" if self.pins else "cached"

    @property
    def holder_name(self) -> str:
        return f"checkpoint {self.position} of {self._maker}"

    def leases(self) -> Iterator[Lease]:
        return (part for part in self.parts if part is not None)

    def units_of(self, group: int) -> Sequence[int]:
        """The units it holds in group `group`."""
        part = self.parts[group]
        return () if part is None else part.units

    def count_now(self) -> None:
        """Have an audit in progress count its leases before who refers to it changes."""
        for lease in self.leases():
            lease.count_now()

    def share(self) -> None:
        """A second sequence refers to it from now on."""
        if not self.shared:
            self.shared = True
            for lease in self.leases():
                lease.pool.add_reader(lease.units, lease.pool.reads(self.position))

    def check_floors(self) -> None:
        """For the audit: raises `InvariantError` if several sequences refer to it and its units may be written."""
        for lease in self.leases() if self.references > 1 else ():
            if wrong := lease.pool.unprotected(lease.units, lease.pool.reads(self.position)):
                raise InvariantError(f"{lease.pool.name}: units {wrong} of {self.holder_name} may still be written")

    def release(self) -> None:
        """End it."""
        for lease in self.leases():
            lease.release()
        self.parts = []
