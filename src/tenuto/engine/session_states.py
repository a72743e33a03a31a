"""Export and import of the state of single sessions."""

from __future__ import annotations

from array import array
from typing import ClassVar

import numpy as np

from tenuto.base.errors import InvalidRequest, InvariantError
from tenuto.base.plan import Bytes, Copier, CopyFailed
from tenuto.base.wire.state_file import CopiedState, StateFile
from tenuto.engine.core import Core
from tenuto.engine.guard import guarded
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.occupation import Occupation
from tenuto.memory.pool import HolderKind, Lease
from tenuto.memory.session_memory import SessionMemory
from tenuto.memory.tiers.left_state import Wanted
from tenuto.memory.tiers.lent import LentUnits
from tenuto.session.session import Session


class SessionStates:
    """Copies the state of sessions without open turns out of memory, and into it."""

    holder_kind: ClassVar[HolderKind] = "copy"
    holder_name = "an imported session"

    def __init__(self, core: Core, lifecycle: Lifecycle, occupation: Occupation) -> None:
        self.fuse = core.fuse
        self._memory = core.memory
        self._copier: Copier = core.executor
        self._registry = core.registry
        self._idle_memory = core.idle_memory
        self._batch = core.batch
        self._imports = core.counts.imports
        self._lifecycle = lifecycle
        self._occupation = occupation

    def leases(self) -> list[Lease]:
        """Returns no leases: between steps no copy is under way."""
        return []

    @property
    def unit_bytes(self) -> list[int]:
        """The size in bytes of a unit of each group."""
        return [self._copier.unit_bytes(group) for group in range(len(self._memory.groups))]

    @guarded
    def of(self, session_id: str, tenant: str = "") -> CopiedState | LentUnits:
        """Returns a session's state: a copy, or its parked memory, which another thread may read until `take_back`; the
        state of no tokens if other weights than those in use have computed any of it. Raises `SessionBusy` while a turn
        is open."""
        session = self._registry.get(session_id, tenant)
        session.require_idle("export the state of")
        memory, nothing = session.memory, CopiedState(0, [[] for _ in self._memory.groups])
        if self._idle_memory.position(session) < memory.computed:
            if not memory.is_current:
                return nothing
            try:
                kept = memory.kept()
                groups = [self._read(group, each) for group, each in enumerate(kept)]
            except CopyFailed as error:
                raise InvalidRequest(
                    f"the session's state cannot be copied: {error}; export the session without its state"
                ) from error
            return CopiedState(memory.computed, groups)
        if not self._idle_memory.is_parked_current(session):
            return nothing
        return self._idle_memory.lend(session) or nothing

    def take_back(self, lent: LentUnits) -> None:
        """Ends the loan of parked memory, whether it was read or not."""
        self._idle_memory.tiers.take_back(lent)

    def _read(self, group: int, units: array[int]) -> list[Bytes]:
        return list(self._copier.read_units(group, np.array(units, np.int32)))

    def check(self, file: StateFile) -> None:
        """Raises `InvalidRequest` unless the state has the form of this engine's memory."""
        header = file.header
        if (header.page_size, header.unit_bytes) != (self._memory.page_size, self.unit_bytes):
            raise InvalidRequest(
                f"the session's state is in pages of {header.page_size} tokens and units of {header.unit_bytes} bytes; "
                f"allowed: pages of {self._memory.page_size} tokens and units of {self.unit_bytes} bytes"
            )
        most = max(0, file.document.tokens - 1)
        wanted = self._counts(header.position) if 0 < header.position <= most else [0] * len(header.units)
        if not 0 <= header.position <= most or header.units != wanted:
            raise InvalidRequest(
                f"the session's state is of {header.position} tokens in {header.units} units; allowed: at most {most} "
                f"tokens, in {wanted} units"
            )

    def _counts(self, position: int) -> list[int]:
        tables = SessionMemory(self._memory, self.holder_name).tables
        return [table.kept_units(position) for table in tables]

    @guarded
    def put(self, session_id: str, file: StateFile, tenant: str = "") -> None:
        """Gives a session that was just restored the state in a checked file: on the device if there is room after idle
        sessions have yielded, otherwise in the tiers. If no tier has room, or memory is released, the state is computed
        again later."""
        session = self._registry.get(session_id, tenant)
        if not file.header.position or self._occupation.released:
            return
        if session.memory.computed:
            raise InvariantError(f"{session!r} has memory that its imported state would replace")
        try:
            self._imports["imported" if self._put(session, file) else "no room"] += 1
        except (CopyFailed, InvalidRequest):  # the file can no longer be read
            self._imports["copy failed"] += 1

    def wanted(self, session: Session, most: int) -> Wanted | None:
        """Returns the state of up to `most` tokens that a session needs which was just restored, or `None`."""
        return self._idle_memory.wanted(session, most) if self._takes_state(session) else None

    @guarded
    def take(self, session: Session, wanted: Wanted, state: CopiedState) -> bool:
        """Gives a session the `wanted` state that another process has left, or the part that was found. Returns False
        if the session does not need it any more, or there is no room."""
        if not self._takes_state(session) or self._idle_memory.wanted(session, wanted.position) != wanted:
            return False
        taken = self._idle_memory.hold(session, state)
        self._imports["taken over" if taken else "no room"] += 1
        return taken

    def _takes_state(self, session: Session) -> bool:
        here = self._registry.find(session.id, session.policy.tenant) is session
        return here and session.turn is None and not self._occupation.released

    def _put(self, session: Session, file: StateFile) -> bool:
        """Puts the state on the device or in a tier. Returns False if there is no room."""
        leases = self._room(np.array(file.header.units, np.int64))
        if leases is None:
            return self._idle_memory.hold(session, file.state())
        try:
            for group, lease in enumerate(leases):
                self._fill(group, lease, file)
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        session.memory.receive(file.header.position, leases, self._memory.current)
        self._lifecycle.note_memory(session)
        return True

    def _room(self, needed: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Lease] | None:
        """Returns leases on the units of each group, or `None` if they do not fit beside running turns."""
        running = list(self._batch.running())
        if (needed > self._lifecycle.pressure.room_beside(running)).any():
            return None
        self._lifecycle.pressure.relieve(lambda: needed, running, (), at_once=True)
        if (needed > self._memory.free()).any():
            return None
        leases: list[Lease] = []
        for pool, count in zip(self._memory.pools, needed.tolist(), strict=True):
            lease = pool.acquire(count, self)
            if lease is None:  # a missing lease would shift the state of later groups
                raise InvariantError(f"{pool.name} has {pool.free} free units, but does not lease {count}")
            leases.append(lease)
        return leases

    def _fill(self, group: int, lease: Lease, file: StateFile) -> None:
        first = 0
        for piece in file.pieces(group):
            units = np.array(lease.units[first : first + len(piece)], np.int32)
            self._copier.write_units(group, units, list(piece))
            first += len(piece)
