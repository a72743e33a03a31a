"""Sessions exported and imported under other names, and a full disk that deletes the least recently used."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tenuto.base.errors import InvalidRequest
from tenuto.base.views import SessionState
from tenuto.base.wire.state_file import StateFile, write_state_file
from tenuto.memory.tiers.lent import LentUnits
from tenuto.memory.tiers.parked import Parked, size_of
from tenuto.session.records import SavedSession
from tenuto.session.session import Session
from tests.sim import keeping

if TYPE_CHECKING:
    from tests.sim.actions import RandomWorld
    from tests.sim.world import World

MODEL, WEIGHTS = "a model", "weights"


def leave_and_come(world: RandomWorld, sid: str | None = None) -> None:
    """Exports an idle session, or `sid`, and imports it under another name, which must not be refused."""
    sid = sid or world._pick(lambda s: s.turn is None and not s.policy.ephemeral)
    if sid is None or not world.is_open(sid) or len(world.naive) >= world.config.sessions:
        return
    engine, session = world.engine, world.session_of(sid)
    try:
        state = engine.states.of(sid, **world.own(sid))
        if isinstance(state, LentUnits):
            lent, state = state, state.read()
            engine.states.take_back(lent)
    except InvalidRequest as error:  # a copy has failed
        if not world.config.copy_fail_rate:
            world.found("exports", f"{sid} cannot be exported: {error}")
        return
    with TemporaryDirectory() as folder:
        path = Path(folder, "session")
        document = session.saved().document().signed(MODEL)
        write_state_file(path, document, WEIGHTS, world.config.page_size, engine.states.unit_bytes, state)
        with closing(StateFile(path)) as file:
            try:
                file.check(MODEL, WEIGHTS)
                engine.states.check(file)
                file.verify()
            except InvalidRequest as error:
                world.found("exports", f"{sid} was exported, but its import is refused: {error}")
                return
            name = f"{sid[:6]} at {world.steps}"
            if name not in world.naive:
                world.imported(sid, SavedSession.of(file.document, name, session.policy))
                engine.states.put(name, file, **world.own(name))


def park_last(world: RandomWorld) -> None:
    """Makes a session without a turn yield as under pressure."""
    sid = world._pick(lambda s: s.turn is None and 0 < s.memory.computed < len(s.history))
    if sid is not None:
        world.engine.pressure.drop(world.session_of(sid), "pressure")


class ParkedInOrder:
    """Checks that a full disk deletes the least recently used memory: a session that loses its parked memory for lack
    of room was used before all sessions that keep memory on disk, unless there is too little room without these."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._used: dict[Session, int] = {}  # the step in which it last had a turn or was parked
        # of sessions at rest: the parked memory, its size, the session's version
        self._parked: dict[Session, tuple[Parked, int, int]] = {}
        self._on_disk: set[Parked] = set()  # those of them on disk
        self._failures: Counter[str] = Counter()

    def look(self) -> None:
        """Looks at the changes since the last step ended."""
        world, disk = self._world, self._world.disk
        parking = world.engine.idle_memory
        if disk is None or disk.fills_early:
            return
        failed = Counter(parking.tiers.failures) - self._failures
        if set(failed) == {"full"} and not keeping.is_leaving(world.engine):
            self._check(disk.budget)
        self._failures = Counter(parking.tiers.failures)
        before, self._parked = self._parked, {}
        self._on_disk.clear()
        for session in world.engine.registry:
            parked = keeping.parked_of(world.engine, session)
            if session.turn is not None or (parked is not None and before.get(session, (None,))[0] is not parked):
                self._used[session] = world.steps
            if parked is not None and session.turn is None:
                self._parked[session] = parked, size_of(parked), session.version
                if parked.on_disk:
                    self._on_disk.add(parked)

    def _check(self, budget: int) -> None:
        engine = self._world.engine
        lost = [
            session
            for session, (parked, size, version) in self._parked.items()
            if (session.state, session.turn, session.version) == (SessionState.OPEN, None, version)
            and size <= budget
            and keeping.is_worth_disk(engine, size, parked.position)
            and parked not in self._on_disk  # files on disk have an order of their own
            and keeping.parked_of(engine, session) is None
        ]
        kept = [
            session
            for session, (parked, _, _) in self._parked.items()
            if keeping.parked_of(engine, session) is parked and keeping.stays_on_disk(engine, session)
        ]
        for session in lost:
            earlier = [other for other in kept if self._used[other] < self._used[session]]
            if keeping.freed_without(engine, earlier) >= self._parked[session][1]:
                self._world.found("tiers", f"{session!r} is no longer parked, and {earlier}, used before it, are")
