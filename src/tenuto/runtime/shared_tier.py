"""The shared tier: the state that the replicas of a fleet have saved, in an object store."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec

from tenuto.base.views import SessionKey, SharedTierView
from tenuto.memory.tiers.disk import DiskFailed, Listed, Listing, Readable, Run
from tenuto.memory.tiers.left_state import LeftState
from tenuto.memory.tiers.state_index import StateIndex
from tenuto.memory.tiers.unit_files import INDEX, MAX_HEADER, SUFFIX, UnitReader
from tenuto.runtime.folders import numbers, prefix_of
from tenuto.runtime.mirror import Mirror
from tenuto.runtime.object_store import ObjectMissing, ObjectStore, StoreFailed

LISTING = ".session"
MAX_LISTING = 2**28
"""The most bytes of a session's listing."""
DOWNLOADS = 4
"""The number of files that are read at once."""
UNREACHABLE_SECONDS = 10.0
"""The time after a failure in which nothing is read, so that requests do not wait for a store that does not answer."""
REMOVED = 1000
"""The most objects that one call of `tidy` removes."""
_FILE = re.compile(rf"[0-9a-f]{{1,64}}{re.escape(SUFFIX)}")


class LeftSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session's listing in an index whose units have this `meaning`. `files`: for each file, the bytes of its units,
    and its size."""

    meaning: str
    position: Annotated[int, msgspec.Meta(ge=0)]
    runs: list[Run]
    files: dict[str, tuple[int, int]]


class _Alone:
    """An index that lists one session, whatever its key."""

    def __init__(self, left: LeftSession) -> None:
        self._left = left

    def meaning(self) -> str:
        return self._left.meaning

    def find(self, _: SessionKey) -> Listed:
        return Listed(self._left.position, [(name, size) for name, (size, _) in self._left.files.items()])

    def runs(self, _: SessionKey) -> list[Run]:
        return self._left.runs


class SharedFolder:
    """The place of one replica in the store, as the `Target` of a `Mirror`: files of its disk tier under their names,
    and a JSON object for each session."""

    def __init__(self, store: ObjectStore, secret: str, number: int, directory: Path) -> None:
        """`directory`: of the disk tier."""
        self._store = store
        self._secret = secret
        self._folder = f"{prefix_of(secret)}-{number}"
        self._directory = directory

    def put_file(self, name: str) -> int | None:
        try:
            return self._store.put_file(f"{self._folder}/{name}", self._directory / name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreFailed(f"{name} cannot be read: {error}") from error

    def put_listing(self, key: SessionKey, meaning: str, listing: Listing, lengths: dict[str, int]) -> None:
        files = {name: (size, lengths[name]) for name, size in listing.sizes.items()}
        data = msgspec.json.encode(LeftSession(meaning, listing.position or 0, list(listing.runs), files))
        self._store.put(f"{self._folder}/{self.listing_name(key)}", data)

    def listing_name(self, key: SessionKey) -> str:
        return listing_name(self._secret, key)

    def remove(self, names: Collection[str]) -> None:
        self._store.remove([f"{self._folder}/{name}" for name in sorted(names)])

    def names(self) -> set[str]:
        return self._store.names(self._folder)


class SharedTier:
    """The saved state of all replicas in the store, as `LeftFolders`. `mirror`: copies what this replica saves.

    Invariant: objects are removed only if their replica was not `needed` twice in a row. Nothing in the store is
    trusted: state is used only if the files say that it is what the session's tokens demand.
    """

    def __init__(
        self,
        store: ObjectStore,
        secret: str,
        number: int,
        directory: Path,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`secret`: of the fleet. `number`: of this replica. `directory`: of its disk tier. `now`: a clock of
        seconds."""
        self._store = store
        self._secret = secret
        self._prefix = prefix_of(secret)
        self._number = number
        self._directory = directory
        self._now = now
        self.mirror = Mirror(StateIndex(directory / INDEX), SharedFolder(store, secret, number, directory))
        self._asked_again_at = now()
        self._unneeded: set[int] = set()

    def view(self) -> SharedTierView:
        """Returns the store's use so far."""
        moved, failures = dict(self._store.moved), dict(self._store.failures)
        return SharedTierView(moved=moved, failures=failures, waiting=self.mirror.waiting)

    def of(self, replica: int, key: SessionKey) -> LeftState:
        folder = f"{self._prefix}-{replica}"
        if self._now() < self._asked_again_at:
            raise DiskFailed("read", "the shared tier could not be asked a moment ago")
        left = self._left(f"{folder}/{listing_name(self._secret, key)}")
        return LeftState(_Alone(left), lambda identity: self.opened(folder, left, identity))

    def _left(self, name: str) -> LeftSession:
        """Returns a session's listing. Raises `DiskFailed`."""
        try:
            return msgspec.json.decode(self._ask(lambda: self._store.get(name, MAX_LISTING)), type=LeftSession)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DiskFailed("read", f"what is listed is malformed: {error}") from error

    def _ask(self, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except StoreFailed as error:
            if not isinstance(error, ObjectMissing):
                self._asked_again_at = self._now() + UNREACHABLE_SECONDS
            raise DiskFailed("read", f"the shared tier has no state: {error}") from error

    @contextmanager
    def opened(self, folder: str, left: LeftSession, identity: str) -> Iterator[Readable]:
        """Copies the files of a session to a temporary directory, from which they can be read. Raises `DiskFailed`."""
        sizes = _checked(left.files)
        with self._room() as directory:

            def get(file: str) -> bytes:
                return self._ask(lambda: self._get(f"{folder}/{file}", sizes[file], directory / file))

            with ThreadPoolExecutor(DOWNLOADS, "tenuto-downloads") as downloads:
                list(downloads.map(get, sizes))
            with closing(UnitReader(directory, identity)) as reader:
                yield reader

    @contextmanager
    def _room(self) -> Iterator[Path]:
        try:
            room = TemporaryDirectory(prefix="arriving-", dir=self._directory, ignore_cleanup_errors=True)
        except OSError as error:
            raise DiskFailed("write", f"there is no room for state that arrives: {error}") from error
        with room as name:
            yield Path(name)

    def _get(self, name: str, size: int, path: Path) -> bytes:
        self._store.get_file(name, size, path)
        return b""

    def tidy(self, needed: Callable[[Collection[int]], Collection[int]]) -> None:
        there = {number for number in numbers(self._store.folders(), self._prefix) if number != self._number}
        unneeded = there - set(needed(there)) if there else set()
        rest = REMOVED
        for number in sorted(unneeded & self._unneeded):
            folder = f"{self._prefix}-{number}"
            names = [f"{folder}/{name}" for name in sorted(self._store.names(folder))[:rest]]
            self._store.remove(names)
            rest -= len(names)
        self._unneeded = unneeded


def listing_name(secret: str, key: SessionKey) -> str:
    """Returns the name of the object with a session's listing, which cannot be guessed."""
    digest = hashlib.blake2b(digest_size=16, key=hashlib.blake2b(secret.encode()).digest(), person=b"tenuto-listing")
    for part in key:
        digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return f"{digest.hexdigest()}{LISTING}"


def _checked(files: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Returns the sizes of files. Raises `DiskFailed` if a size or a name cannot be right."""
    for name, (units, size) in files.items():
        if not _FILE.fullmatch(name) or not 0 <= size - units <= MAX_HEADER:
            raise DiskFailed("read", "what is listed is malformed: a name or a size of a file cannot be right")
    return {name: size for name, (_, size) in files.items()}
