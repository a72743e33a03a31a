"""The mirror: copies the state that a replica's disk tier saves to a store that the replicas of a fleet share."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import islice
from typing import Protocol, TypeVar

from tenuto.base.views import SessionKey
from tenuto.memory.tiers.disk import DiskFailed, Listing
from tenuto.memory.tiers.state_index import StateIndex
from tenuto.runtime.object_store import StoreFailed

log = logging.getLogger("tenuto.fleet")

SETTLED = 1.0
"""The seconds for which changes of a session's saved state wait, so that several in a row are copied once."""
TOGETHER = 32
"""The most sessions that are copied in one round."""
UPLOADS = 4
"""The number of objects that are written at once."""
RECHECK_SECONDS = 600.0
"""How often to compare the store with what should be there: others may have removed objects."""
POLL_SECONDS = 0.25
RETRY_SECONDS = 1.0, 60.0
"""The time after a failure until the store is asked again: the first, and the longest."""
TOLD_SECONDS = 60.0
"""The least time between two lines of the log about failures."""

T = TypeVar("T")


class Target(Protocol):
    """The place in the store for the copies of one replica. All methods raise `StoreFailed`."""

    def put_file(self, name: str) -> int | None:
        """Copies a file of the disk tier and returns its size, or `None` if the file no longer exists."""

    def put_listing(self, key: SessionKey, meaning: str, listing: Listing, lengths: dict[str, int]) -> None:
        """Writes what the index lists for a session, in which units have this `meaning`, and the sizes of files."""

    def listing_name(self, key: SessionKey) -> str:
        """Returns the name of the object with what the index lists for a session."""

    def remove(self, names: Collection[str]) -> None:
        """Removes objects."""

    def names(self) -> set[str]:
        """Returns the names of all objects."""


class Mirror:
    """Copies the files of a disk tier, and what its index lists for each session, to a store. As a `Watcher` it only
    notes changes of the disk. Its own thread does the rest, so steps and writes to disk never wait for the store.

    Invariants: the object with a session's listing names only files that have copies. A copy is written before an
    object names it, and removed after none does. A file in which units were overwritten is copied again, or its copy is
    removed, however many attempts that takes. So once nothing changes any more, the store has copies of all that the
    index lists and of nothing else, and their size is bounded by that of the disk tier. A request that fails is
    repeated; that costs only time.
    """

    def __init__(self, index: StateIndex, target: Target, uploads: Executor | None = None) -> None:
        """`index`: a connection to the disk's index, for this object alone."""
        self._index = index
        self._target = target
        self._uploads = uploads or ThreadPoolExecutor(UPLOADS, "tenuto-uploads")
        self._guard = threading.Lock()
        # `_guard` guards these:
        self._waiting: dict[SessionKey, float | None] = {}  # changed sessions; since when, once a round has seen them
        self._all_changed = False  # whether all sessions in `_listed` have changed
        self._overwritten: set[str] = set()  # files that may have outdated copies
        # One thread at a time uses these:
        self._listed: dict[SessionKey, frozenset[str]] = {}  # the files that the object of each session names
        self._lengths: dict[str, int] = {}  # of the files that have copies
        self._uses: Counter[str] = Counter()  # how many objects of sessions name a file
        self._fresh: set[str] = set()  # files that have copies, and that no such object has named yet
        self._unlisted: set[str] = set()  # objects of sessions to be removed
        self._unused: set[str] = set()  # copies of files to be removed after these objects
        self._recheck_at = float("-inf")
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._failures, self._told_at = 0, float("-inf")  # since the last line of the log about them

    # -- changes of the disk

    def listed(self, keys: Iterable[SessionKey]) -> None:
        with self._guard:
            for key in keys:
                self._waiting.setdefault(key, None)

    def cleared(self) -> None:
        with self._guard:
            self._all_changed = True

    def overwritten(self, file: str) -> None:
        with self._guard:
            self._overwritten.add(file)

    @property
    def waiting(self) -> int:
        """The number of sessions whose saved state, or its removal, has yet to reach the store."""
        return len(self._waiting)

    # -- rounds

    def round(self, now: float, settled: float = SETTLED) -> bool:
        """Copies the saved state of up to `TOGETHER` sessions that have waited for `settled` seconds. Returns whether
        there was anything to do. Raises `StoreFailed` or `DiskFailed`; the rest is then left for a later round."""
        if now >= self._recheck_at:
            self._recheck()
            self._recheck_at = now + RECHECK_SECONDS
        sessions, files = self._take(now, settled)
        if not (sessions or files or self._unlisted or self._unused or self._fresh):
            return False
        try:
            self._copy_again(files)
            self._copy(sessions)
            self._remove()
        finally:  # notes what is left
            with self._guard:
                self._overwritten |= files
                for key in sessions:
                    self._waiting.setdefault(key, now)
        return True

    def _take(self, now: float, settled: float) -> tuple[set[SessionKey], set[str]]:
        """Takes the sessions that have waited long enough, and the files to be copied again."""
        with self._guard:
            if self._all_changed:
                self._all_changed = False
                for key in self._listed:
                    self._waiting.setdefault(key, None)
            for key, since in self._waiting.items():
                self._waiting[key] = now if since is None else since
            waiting = ((key, now if since is None else since) for key, since in self._waiting.items())
            due = list(islice((key for key, since in waiting if now >= since + settled), TOGETHER))
            for key in due:
                del self._waiting[key]
            files, self._overwritten = self._overwritten, set()
        return set(due), files

    def _copy_again(self, files: set[str]) -> None:
        for name in sorted(files):
            if name in self._lengths and self._target.put_file(name) is None:
                self._give_up(name)
            files.discard(name)

    def _copy(self, sessions: set[SessionKey]) -> None:
        """Copies what the index lists for sessions. Each is removed from the set once its copy is complete."""
        wanted: dict[SessionKey, tuple[str, Listing]] = {}
        for key in sorted(sessions):
            if (found := self._found(key)) is not None:
                wanted[key] = found
            else:
                self._unlist(key)
                sessions.discard(key)
        lacking = {name for _, listing in wanted.values() for name in listing.sizes} - self._lengths.keys()
        self._each(self._copy_file, sorted(lacking))
        for key, (_, listing) in tuple(wanted.items()):
            if not listing.sizes.keys() <= self._lengths.keys():  # it has changed meanwhile, and waits again
                del wanted[key]
                sessions.discard(key)

        def put(key: SessionKey) -> None:
            meaning, listing = wanted[key]
            names = frozenset(listing.sizes)
            try:
                self._target.put_listing(key, meaning, listing, {name: self._lengths[name] for name in names})
            except StoreFailed:  # it may have been written nevertheless
                self._list(key, names | self._listed.get(key, frozenset()))
                raise
            self._list(key, names)
            sessions.discard(key)

        self._each(put, wanted)

    def _found(self, key: SessionKey) -> tuple[str, Listing] | None:
        try:
            return self._index.listing(key)
        except ValueError as error:
            raise DiskFailed("read", f"the index is malformed: {error}") from error

    def _each(self, do: Callable[[T], None], each: Iterable[T]) -> None:
        """Calls `do` for each of these concurrently, and raises the last error once all calls have ended."""
        failed: StoreFailed | None = None
        for done in [self._uploads.submit(do, one) for one in each]:
            try:
                done.result()
            except StoreFailed as error:
                failed = error
        if failed is not None:
            raise failed

    def _copy_file(self, name: str) -> None:
        try:
            length = self._target.put_file(name)
        except StoreFailed:  # it may have been written nevertheless
            with self._guard:
                self._unused.add(name)
            raise
        if length is not None:
            with self._guard:
                self._lengths[name] = length
                self._fresh.add(name)
                self._unused.discard(name)

    def _list(self, key: SessionKey, names: frozenset[str]) -> None:
        """Notes that the object of a session names these files."""
        with self._guard:
            for removed in (self._unlisted, self._unused):
                removed.discard(self._target.listing_name(key))
            self._uses.update(names)
            self._fresh -= names
            self._end_uses(self._listed.get(key, frozenset()))
            self._listed[key] = names

    def _unlist(self, key: SessionKey) -> None:
        """Notes that a session's object is to be removed."""
        with self._guard:
            if (names := self._listed.pop(key, None)) is not None:
                self._unlisted.add(self._target.listing_name(key))
                self._end_uses(names)

    def _end_uses(self, names: Iterable[str]) -> None:
        for name in names:
            self._uses[name] -= 1
            if not self._uses[name]:
                self._give_up(name)

    def _give_up(self, name: str) -> None:
        """Notes that a file's copy cannot be used and is to be removed."""
        self._lengths.pop(name, None)
        self._unused.add(name)
        if not self._uses[name]:
            del self._uses[name]

    def _remove(self) -> None:
        """Removes the objects that are not needed any more."""
        for name in self._fresh:  # of sessions that have changed before they were listed
            self._give_up(name)
        self._fresh.clear()
        for names in (self._unlisted, self._unused):
            if names:
                self._target.remove(names)
                names.clear()

    def _recheck(self) -> None:
        """Compares the store's objects with those that it should have: missing ones are to be copied again, and others
        to be removed."""
        there = self._target.names()
        for key, names in tuple(self._listed.items()):
            if not there.issuperset((self._target.listing_name(key), *names)):
                self._unlist(key)
                self.listed([key])
        for name in self._lengths.keys() - there:
            self._give_up(name)
        listings = {self._target.listing_name(key) for key in self._listed}
        self._unused |= there - self._lengths.keys() - listings - self._unlisted

    # -- the thread

    def start(self, now: Callable[[], float]) -> None:
        """Begins to copy. `now`: a clock of seconds."""
        self._thread = threading.Thread(target=self._run, args=(now,), name="tenuto-mirror", daemon=True)
        self._thread.start()

    def _run(self, now: Callable[[], float]) -> None:
        pause, (retry, longest) = POLL_SECONDS, RETRY_SECONDS
        while not self._closing.wait(pause):
            if self._try(now):
                pause, retry = POLL_SECONDS, RETRY_SECONDS[0]
            else:
                pause, retry = retry, min(2 * retry, longest)

    def _try(self, now: Callable[[], float]) -> bool:
        """Copies all that is due. Returns False if that fails, and logs it now and then."""
        try:
            while not self._closing.is_set() and self.round(now()):
                pass
        except (StoreFailed, DiskFailed) as error:
            self._failures += 1
            if now() >= self._told_at + TOLD_SECONDS:
                about = {"reason": str(error), "failures": self._failures, "waiting": self.waiting}
                log.warning("saved state cannot be copied to the shared tier", extra=about)
                self._failures, self._told_at = 0, now()
            return False
        except Exception:  # a bug of ours; what is copied is checked by those who read it
            log.exception("saved state could not be copied to the shared tier")
            return False
        return True

    def close(self, now: Callable[[], float], seconds: float) -> None:
        """Ends the thread, then copies what is left, for about `seconds` at most."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        until = now() + seconds
        try:
            while now() < until and self.round(now(), settled=0.0):
                pass
        except (StoreFailed, DiskFailed) as error:
            log.warning("saved state cannot be copied to the shared tier", extra={"reason": str(error)})
        self._uploads.shutdown()
        self._index.close()
        if self.waiting:
            log.warning("saved state was not copied to the shared tier", extra={"sessions": self.waiting})
