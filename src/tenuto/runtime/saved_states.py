"""The state that other replicas of a fleet have saved, for sessions that this one has claimed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tenuto.base.errors import EngineStopped
from tenuto.base.views import SessionKey
from tenuto.base.wire.state_file import CopiedState
from tenuto.engine.thread.loop import EngineLoop
from tenuto.memory.tiers.disk import DiskFailed, IndexUnusable
from tenuto.runtime.folders import LeftFolders
from tenuto.session.session import Session

log = logging.getLogger("tenuto.fleet")


class SavedStates:
    """Reads saved state in another thread. Requests for a session wait until its state has arrived: a turn that began
    earlier would compute it again."""

    def __init__(self, places: Sequence[LeftFolders], loop: EngineLoop) -> None:
        """`places`: where replicas leave state; the first that has the state of a session is used."""
        self._places = places
        self._loop = loop
        self._reading = ThreadPoolExecutor(1, "tenuto-folders")  # the only user of `_places`
        self._arriving: dict[SessionKey, Future[None]] = {}  # sessions whose state is still being read

    def close(self) -> None:
        """Waits until all reads have ended."""
        self._reading.shutdown()

    def begin(self, session: Session, owner: int) -> None:
        """Begins to read the state of a session that was just claimed, which replica `owner` has left."""
        self._arriving[session.key] = arrived = Future[None]()
        self._reading.submit(self._read, session, owner, arrived)

    def once_here(self, key: SessionKey, then: Callable[[], None]) -> None:
        """Calls `then` once the state of a session has arrived; at once if it is not being read."""
        if (arriving := self._arriving.get(key)) is not None:
            arriving.add_done_callback(lambda _: then())
        else:
            then()

    def tidy(self, needed: Callable[[Collection[int]], Collection[int]]) -> None:
        """Begins to remove the state that replicas have left which are gone; see `LeftFolders.tidy`."""
        self._reading.submit(self._tidy, needed)

    def _read(self, session: Session, owner: int, arrived: Future[None]) -> None:
        try:
            self.find(session, owner)
        except EngineStopped:
            pass
        except Exception:  # a bug of ours; the state is computed then
            log.exception("saved state could not be taken over")
        finally:
            self.arrive(session, arrived)

    def find(self, session: Session, owner: int) -> None:
        """Gives a session the state that its earlier owner has left, if a place has it. Raises `EngineStopped`."""
        about = {"session": session.id, "owner": owner}
        reasons: list[str] = []
        for place in self._places:
            try:
                if self.fetch(place, session, owner):
                    log.info("saved state taken over", extra=about)
                    return
            except (DiskFailed, IndexUnusable) as error:
                reasons.append(str(error))
        if reasons:
            log.info("no saved state is there", extra={**about, "reason": "; ".join(reasons)})

    def arrive(self, session: Session, arrived: Future[None]) -> None:
        """Calls those that wait for the state of a session, whether it was found or not."""
        if self._arriving.get(session.key) is arrived:
            del self._arriving[session.key]
        arrived.set_result(None)

    def fetch(self, place: LeftFolders, session: Session, owner: int) -> bool:
        """Gives a session the state that its earlier owner has left in a place. Returns whether the session took it.
        Raises `DiskFailed`, `IndexUnusable` or `EngineStopped`."""
        left = place.of(owner, session.key)
        reached = left.reaches(session.key)
        wanted = self._loop.call(lambda engine: engine.states.wanted(session, reached)).result()
        if wanted is None:
            return False
        state = CopiedState(*left.read(session.key, wanted))
        return bool(state.position) and self._loop.call(lambda it: it.states.take(session, wanted, state)).result()

    def _tidy(self, needed: Callable[[Collection[int]], Collection[int]]) -> None:
        for place in self._places:
            try:
                place.tidy(needed)
            except Exception as error:  # noqa: BLE001 - of the database, of a store, or of one that is closing
                log.warning("folders of replicas that are gone cannot be removed: %s", error)
