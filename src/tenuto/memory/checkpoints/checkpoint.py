"""A checkpoint: leases on a resumable position, shared by all sequences that resume there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tenuto.base.errors import InvariantError
from tenuto.memory.pool import HolderKind, Lease


@dataclass(eq=False, repr=False, slots=True)  # `below` begins a long chain
class Checkpoint:
    """Leases on the units that resuming at `position` needs, except full attention's, which the sequence itself holds.

    `parts[g]` is the lease in group g of the memory spec: a sliding window's pages, a state slot, or `None` for full
    attention. The parts do not change until the checkpoint ends and releases them. Any number of sequences may refer to
    a checkpoint; its lease on each unit serves all of them.

    When a second sequence refers to it, it becomes `shared`, and the floors of its units (see `Pool`) keep them from
    being overwritten. Before that, the only sequence that refers to it may be cut back and overwrite its units.

    Invariant: `references` counts the sequences that refer to it, and `pins` those that need it; it is in the cache if
    it has references and no pins. It ends with its last reference, or earlier when it is evicted; sequences that still
    refer to it then see `evicted`. Both counts are written by `CheckpointCache`; `Thinning` writes the fields about its
    order among other checkpoints.
    """

    position: int
    maker: str  # the name of the session or turn that made it
    below: Checkpoint | None = None  # the nearest one below in its sequence, or one in between that has ended
    parts: list[Lease | None] = field(default_factory=list)  # filled once, by its maker
    references: int = 0
    pins: int = 0
    shared: bool = False  # written by `share`
    evicted: bool = False
    ended: bool = False
    branches: int = 0
    reach: int = field(init=False)
    reached: int = 0
    needed_at: int = 0

    def __post_init__(self) -> None:
        self.reach = self.position

    @property
    def holder_kind(self) -> HolderKind:
        """`cached` if no sequence needs it, so that it only saves work."""
        return "checkpoint" if self.pins else "cached"

    @property
    def holder_name(self) -> str:
        return f"checkpoint {self.position} of {self.maker}"

    def leases(self) -> Iterator[Lease]:
        return (part for part in self.parts if part is not None)

    def units_of(self, group: int) -> Sequence[int]:
        """Returns the units it holds in group `group`."""
        part = self.parts[group]
        return () if part is None else part.units

    def count_now(self) -> None:
        """Makes an audit in progress count its leases before the references to it change."""
        for lease in self.leases():
            lease.count_now()

    def share(self) -> None:
        """Raises the floors of its units, because a second sequence refers to it from now on."""
        if not self.shared:
            self.shared = True
            for lease in self.leases():
                lease.pool.add_reader(lease.units, lease.pool.reads(self.position))

    def check_floors(self) -> None:
        """Raises `InvariantError` if several sequences refer to it and its units may be written; for the audit."""
        for lease in self.leases() if self.references > 1 else ():
            if wrong := lease.pool.unprotected(lease.units, lease.pool.reads(self.position)):
                raise InvariantError(f"{lease.pool.name}: units {wrong} of {self.holder_name} may still be written")

    def release(self) -> None:
        """Releases its leases, which ends it."""
        for lease in self.leases():
            lease.release()
        self.parts = []
