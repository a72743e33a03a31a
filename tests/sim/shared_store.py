"""A shared tier of simulated replicas, whose store fails, and returns what is truncated, old, or somebody else's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec

from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.disk import DiskFailed, Readable, UnitFile
from tenuto.runtime.folders import numbers, prefix_of
from tenuto.runtime.mirror import Mirror
from tenuto.runtime.object_store import ObjectMissing, ObjectStore, StoreFailed
from tenuto.runtime.shared_tier import LISTING, LeftSession, SharedFolder, SharedTier, listing_name
from tests.sim.disk import FaultyDisk
from tests.sim.violation import Violation

FAILS = 0.08
"""The probability that a request fails, before or after it is carried out."""
SPOILS = 0.15
"""The probability that an object is read which is not what it should be."""

SECRET = "of all fleets: names of objects do not depend on chance"

Units = dict[int, list[NamedUnit]]
Stored = bytes | Units
"""An object: what is listed for a session, or the units of a file."""


class SharedStore:
    """The objects of all replicas. `chance`: decides what fails; nothing does while the world is `calm`. `needed`:
    which of some replicas live or own sessions, as the database says. `loses`: whether objects vanish."""

    def __init__(
        self,
        chance: Random,
        disks: Mapping[int, FaultyDisk],
        calm: Callable[[], bool],
        needed: Callable[[Collection[int]], Collection[int]],
        *,
        loses: bool,
    ) -> None:
        self.chance = chance
        self.loses = loses
        self.disks = disks
        self.calm = calm
        self.needed = needed
        self.objects: dict[str, Stored] = {}
        self.tidied: set[str] = set()  # folders from which objects have gone otherwise
        self._older: dict[str, list[Stored]] = {}

    def fails(self, when: str) -> bool:
        """Whether a request fails now: "before" or "after" it is carried out."""
        return not self.calm() and self.chance.random() < FAILS / 2

    def put(self, name: str, content: Stored) -> None:
        if name in self.objects:
            self._older.setdefault(name, []).append(self.objects[name])
        self.objects[name] = content

    def read(self, name: str, kind: type[Any]) -> Any:
        """Returns an object, or sometimes another one of its kind, or what it was before."""
        if self.fails("before"):
            raise StoreFailed("simulated failure")
        if name not in self.objects:
            raise ObjectMissing(name)
        same = [each for each in self.objects.values() if isinstance(each, kind)]
        spoiled = not self.calm() and self.chance.random() < SPOILS
        return self.chance.choice([*same, *self._older.get(name, ())]) if spoiled else self.objects[name]

    def names(self, folder: str) -> set[str]:
        return {name.removeprefix(f"{folder}/") for name in self.objects if name.startswith(f"{folder}/")}

    def lose(self, folder: str) -> None:
        """Removes an object from a folder, if there is one."""
        for name in self.chance.sample(sorted(self.names(folder)), min(1, len(self.names(folder)))):
            del self.objects[f"{folder}/{name}"]
            self.tidied.add(folder)

    def replicas(self) -> set[int]:
        """Returns the numbers of all replicas with objects."""
        return {int(name.partition("/")[0].rpartition("-")[2]) for name in self.objects}

    def listing(self, name: str) -> LeftSession:
        return msgspec.json.decode(cast("bytes", self.objects[name]), type=LeftSession)

    def check(self, folder: str) -> None:
        """Checks that no session's object in a folder names a file that is missing."""
        there = self.names(folder)
        for name in there:
            if name.endswith(LISTING) and not self.listing(f"{folder}/{name}").files.keys() <= there:
                raise Violation(f"{folder}/{name} names files that are missing")


class Client:
    """The `ObjectStore` of one replica. `meanwhile`: what the replica does while a request is under way."""

    def __init__(self, store: SharedStore, own: str, meanwhile: Callable[[], None]) -> None:
        self._store = store
        self._own = own
        self._meanwhile = meanwhile

    @contextmanager
    def _changing(self) -> Iterator[SharedStore]:
        if not self._store.calm() and self._store.chance.random() < 0.3:
            self._meanwhile()
        if self._store.fails("before"):
            raise StoreFailed("the request is lost")
        yield self._store
        if self._store.fails("after"):
            raise StoreFailed("the answer is lost")

    def put(self, name: str, data: bytes) -> None:
        with self._changing() as store:
            store.put(name, data)

    def put_file(self, name: str, path: Path) -> int:
        with self._changing() as store:
            files = store.disks[int(path.parent.name)]._files
            if path.name not in files:
                raise FileNotFoundError(path)
            units = files[path.name].items()
            store.put(
                name, {group: [NamedUnit(each.content, each.data.copy()) for each in rows] for group, rows in units}
            )
        return 0

    def get(self, name: str, most: int) -> bytes:
        data: bytes = self._store.read(name, bytes)
        return data if self._store.calm() or self._store.chance.random() > SPOILS / 2 else data[: len(data) // 2]

    def units(self, name: str) -> Units:
        units: Units = self._store.read(name, dict)
        return units

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            with self._changing() as store:
                folder = name.partition("/")[0]
                if folder != self._own:
                    store.tidied.add(folder)
                    if store.needed(list(numbers([folder], folder.rpartition("-")[0]))):
                        raise Violation(f"{name} is removed, though its replica is needed")
                store.objects.pop(name, None)

    def names(self, folder: str) -> set[str]:
        if self._store.fails("before"):
            raise StoreFailed("the request is lost")
        return self._store.names(folder)

    def folders(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self._store.objects})


class AtOnce(Executor):
    """Does at once what it is to do."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done = Future[Any]()
        try:
            done.set_result(work(*given, **named))
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
            done.set_exception(error)
        return done


class SimulatedTier(SharedTier):
    """The shared tier of one replica."""

    def __init__(
        self, store: SharedStore, number: int, meanwhile: Callable[[], None], now: Callable[[], float]
    ) -> None:
        self.folder = f"{prefix_of(SECRET)}-{number}"
        self._client, self._shared = Client(store, self.folder, meanwhile), store
        self._disk = disk = store.disks[number]
        directory, asked = Path(str(number)), cast("ObjectStore", self._client)
        super().__init__(asked, SECRET, number, directory, now)
        self.mirror = Mirror(disk.index, SharedFolder(asked, SECRET, number, directory), AtOnce())
        disk.watch(self.mirror)

    @contextmanager
    def opened(self, folder: str, left: LeftSession, identity: str) -> Iterator[Readable]:
        yield Stock(self._client, folder)

    def step(self, now: float) -> None:
        """Does one round, and sometimes removes what others have left."""
        with suppress(StoreFailed, DiskFailed):
            self.mirror.round(now, settled=0.1)
        if self._shared.loses and self._shared.chance.random() < 0.1:
            self._shared.lose(self.folder)
        if self._shared.chance.random() < 0.1:
            with suppress(StoreFailed):
                self.tidy(self._shared.needed)

    def check(self) -> None:
        """Checks that no object of a session names a missing file, unless others have removed files."""
        if self.folder not in self._shared.tidied:
            self._shared.check(self.folder)

    def settle(self, now: float) -> None:
        """Lets the mirror do what is left, and checks that there are copies of what is on disk, and no others."""
        self.mirror._recheck_at = now
        for _ in range(100):
            with suppress(DiskFailed):  # of the disk, which still fails
                if not self.mirror.round(now, settled=0.0) and not self.mirror.waiting:
                    break
        self._shared.tidied.discard(self.folder)
        self.check()
        there = self._shared.names(self.folder)
        wanted = {listing_name(self._secret, key) for key in self._disk.index.sessions()}
        if {name for name in there if name.endswith(LISTING)} != wanted:
            raise Violation(f"{self.folder} has other sessions than the disk")
        named: set[str] = set()
        for name in wanted:
            named |= self._shared.listing(f"{self.folder}/{name}").files.keys()
        if named != {name for name in there if not name.endswith(LISTING)}:
            raise Violation(f"{self.folder} has files that no session needs")
        for name in named:
            if not _same(self._shared.objects[f"{self.folder}/{name}"], self._disk._files[name]):
                raise Violation(f"{self.folder}/{name} is another file than that on disk")


class Stock:
    """The files of one replica, as another one reads them."""

    def __init__(self, client: Client, folder: str) -> None:
        self._client = client
        self._folder = folder

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[NamedUnit]]:
        try:
            there = self._client.units(f"{self._folder}/{file.name}")
        except StoreFailed as error:
            raise DiskFailed("read", str(error)) from error
        if any(max(wanted) >= len(there.get(group, ())) for group, wanted in rows.items()):
            raise DiskFailed("read", "it has fewer units")
        return {group: [there[group][row] for row in wanted] for group, wanted in rows.items()}


def _copy(unit: NamedUnit) -> NamedUnit:
    return NamedUnit(unit.content, unit.data.copy())


def _same(one: Stored, other: Units) -> bool:
    """Whether both have the same units."""
    return not isinstance(one, bytes) and all(
        [(each.content, each.data.tolist()) for each in one.get(group, ())]
        == [(each.content, each.data.tolist()) for each in rows]
        for group, rows in other.items()
    )
