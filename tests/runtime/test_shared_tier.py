"""The shared tier: what a disk tier saves is copied, and others read it if it is what they need."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from obstore.store import LocalStore

from tenuto.memory.tiers.contents import Content, NamedUnit
from tenuto.memory.tiers.disk import DiskFailed, Listing, Run, UnitFile
from tenuto.memory.tiers.unit_files import UnitFiles
from tenuto.runtime.mirror import RECHECK_SECONDS, SETTLED, TOGETHER
from tenuto.runtime.object_store import ObjectStore, StoreFailed
from tenuto.runtime.shared_tier import UNREACHABLE_SECONDS, SharedTier, listing_name
from tests.runtime.test_folders import IDENTITY, KEY, MEANING, UNIT, contents, wanted

OTHER = "tenant", "other"


class Disk:
    """The disk tier of replica 1, which is copied, and the shared tier as replica 2 sees it."""

    def __init__(self, path: Path) -> None:
        self.root = path / "store"
        self.root.mkdir()
        self.store = ObjectStore(LocalStore(self.root, automatic_cleanup=True))
        (path / "two").mkdir()
        self.now = 0.0
        self.own = SharedTier(self.store, "secret", 1, path / "one", lambda: self.now)
        self.mirror = self.own.mirror
        self.files = UnitFiles(path / "one", 10**6, IDENTITY, self.mirror)
        self.files.index.begin(MEANING)
        self.other = SharedTier(self.store, "secret", 2, path / "two", lambda: self.now)

    def save(self, key: tuple[str, str] = KEY, first: int = 0) -> UnitFile:
        units = [NamedUnit(content, np.full(UNIT, first + n, np.uint8)) for n, content in enumerate(contents())]
        file = self.files.write({0: units})
        marks = b"".join(content.mark for content in contents())
        self.files.index.apply([Listing(key, 6, (0,), (Run(0, 0, file.name, 0, 3, marks),), {file.name: file.size})])
        return file

    def copy(self) -> None:
        while self.mirror.round(self.now, settled=0.0):
            pass

    def there(self) -> set[str]:
        return {path.name for path in self.root.glob("*/*")}

    def read(self, key: tuple[str, str] = KEY, **changes: object) -> tuple[int, list[list[int]]]:
        position, groups = self.other.of(1, key).read(key, wanted(**changes))
        return position, [[int(unit[0]) for unit in group] for group in groups]

    def object(self, name: str) -> Path:
        (found,) = self.root.glob(f"*/{name}")
        return found


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.files.close(keep=True)
    disk.mirror.close(lambda: disk.now, 0.0)


def test_state_that_was_copied_is_found_by_another_replica(disk: Disk, tmp_path: Path) -> None:
    file = disk.save()
    with pytest.raises(DiskFailed, match="has no state"):
        disk.other.of(1, KEY)
    disk.copy()
    assert disk.there() == {file.name, listing_name("secret", KEY)}
    assert disk.other.of(1, KEY).reaches(KEY) == 6
    assert disk.read() == (6, [[0, 1, 2]])
    assert list((tmp_path / "two").iterdir()) == []  # nothing is left of what has arrived
    assert disk.mirror.waiting == 0


def test_changes_wait_until_they_have_settled_and_are_copied_once(disk: Disk) -> None:
    disk.save()
    assert not disk.mirror.round(1.0)
    file = disk.save(first=7)
    assert not disk.mirror.round(1.0 + SETTLED / 2)
    assert disk.mirror.round(1.0 + SETTLED)
    assert disk.there() == {file.name, listing_name("secret", KEY)}
    assert disk.read() == (6, [[7, 8, 9]])


def test_a_round_has_a_bounded_number_of_sessions(disk: Disk) -> None:
    for number in range(TOGETHER + 1):
        disk.save(("tenant", str(number)))
    disk.mirror.round(0.0, settled=0.0)
    assert disk.mirror.waiting == 1


@pytest.mark.parametrize("bad", [b"", b"{}", b"\xff", b"[1]"])
def test_a_malformed_listing_is_an_error(disk: Disk, bad: bytes) -> None:
    disk.save()
    disk.copy()
    disk.object("*.session").write_bytes(bad)
    with pytest.raises(DiskFailed, match="malformed"):
        disk.read()


@pytest.mark.parametrize(
    "files",
    [{"../../etc/passwd": [48, 100]}, {"a/b.units": [48, 100]}, {"aa.units": [48, 2]}, {"aa.units": [0, 2**40]}],
)
def test_a_listing_cannot_name_other_files_or_wrong_sizes(disk: Disk, files: dict[str, Any]) -> None:
    disk.save()
    disk.copy()
    path = disk.object("*.session")
    told = msgspec.json.decode(path.read_bytes())
    told["runs"][0][2] = next(iter(files))
    path.write_bytes(msgspec.json.encode({**told, "files": files}))
    with pytest.raises(DiskFailed, match="malformed: a name or a size"):
        disk.read()


def test_files_and_listings_that_are_damaged_truncated_swapped_or_foreign_are_not_used(disk: Disk) -> None:
    one, two = disk.save(), disk.save(OTHER, 4)
    disk.copy()
    good = disk.object(one.name).read_bytes()
    for bad in (good[:-1] + b"!", good[:-1], b""):
        disk.object(one.name).write_bytes(bad)
        disk.now += UNREACHABLE_SECONDS
        with pytest.raises(DiskFailed):
            disk.read()
    disk.now += UNREACHABLE_SECONDS
    disk.object(one.name).unlink()
    with pytest.raises(DiskFailed, match="has no state"):
        disk.read()
    assert disk.read(OTHER) == (6, [[4, 5, 6]])
    names = [[*contents()[:2], Content(b"digest of others", contents()[2].tokens)]]
    with pytest.raises(DiskFailed, match="holds the state of other tokens"):
        disk.read(OTHER, names=names)
    with pytest.raises(DiskFailed, match="units of another model"):
        disk.read(OTHER, identity="another")
    assert disk.read(OTHER, meaning="other units") == (0, [[]])
    assert two.name in disk.there()


def test_objects_go_with_the_sessions_that_need_them(disk: Disk) -> None:
    file, other = disk.save(), disk.save(OTHER)
    disk.copy()
    newer = disk.save(first=3)  # the first file stays until the listing no longer names it
    disk.files.remove(file)
    disk.copy()
    assert disk.there() == {newer.name, other.name, *(listing_name("secret", key) for key in (KEY, OTHER))}
    disk.files.index.apply([Listing(KEY, None)])
    disk.copy()
    assert disk.there() == {other.name, listing_name("secret", OTHER)}
    disk.files.index.clear("other weights")
    disk.copy()
    assert disk.there() == set()


def test_a_file_that_is_gone_before_it_was_copied_is_left_out(disk: Disk) -> None:
    disk.files.remove(disk.save())
    disk.files.files()  # waits until it is gone
    disk.copy()
    assert disk.there() == set()
    assert disk.mirror.waiting == 0


def test_overwritten_units_are_overwritten_in_the_store_too(disk: Disk) -> None:
    file = disk.save()
    disk.copy()
    before = disk.object(file.name).read_bytes()
    disk.files.overwrite(file, {(0, 0), (0, 1)})
    disk.copy()
    assert before != disk.object(file.name).read_bytes() == (disk.files._directory / file.name).read_bytes()


def test_what_fails_is_tried_again_and_nothing_is_listed_before_it_is_there(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = disk.save()
    put_file = disk.store.put_file

    def refuse(name: str, path: Path) -> int:
        put_file(name, path)
        raise StoreFailed("the answer is lost")

    with monkeypatch.context() as failing:
        failing.setattr(disk.store, "put_file", refuse)
        with pytest.raises(StoreFailed):
            disk.copy()
    assert disk.there() == {file.name}
    assert disk.mirror.waiting == 1
    disk.copy()
    assert disk.there() == {file.name, listing_name("secret", KEY)}


def test_what_others_have_removed_is_copied_again_and_what_is_too_much_is_removed(disk: Disk) -> None:
    file, other = disk.save(), disk.save(OTHER)
    disk.copy()
    disk.object(file.name).unlink()
    disk.object(listing_name("secret", OTHER)).unlink()
    (disk.object(other.name).parent / "stray.units").touch()
    disk.now += RECHECK_SECONDS
    disk.copy()
    assert disk.there() == {file.name, other.name, *(listing_name("secret", key) for key in (KEY, OTHER))}
    assert disk.read() == (6, [[0, 1, 2]])


def test_a_store_that_has_just_failed_is_not_asked(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.save()
    disk.copy()

    def fail(*_: object) -> bytes:
        raise StoreFailed("it does not answer")

    with monkeypatch.context() as failing:
        failing.setattr(disk.store, "get", fail)
        with pytest.raises(DiskFailed, match="does not answer"):
            disk.read()
    with pytest.raises(DiskFailed, match="a moment ago"):
        disk.read()
    disk.now += UNREACHABLE_SECONDS
    assert disk.read() == (6, [[0, 1, 2]])


def test_objects_that_nobody_needs_twice_in_a_row_are_removed(disk: Disk) -> None:
    disk.save()
    disk.copy()
    disk.store.put("somebody-1/object", b"")
    asked: list[set[int]] = []

    def needed(replicas: Collection[int]) -> set[int]:
        asked.append(set(replicas))
        return {1} if len(asked) == 2 else set()

    for _ in range(3):
        disk.other.tidy(needed)
        assert len(disk.there()) == 3
    disk.other.tidy(needed)
    assert disk.there() == {"object"}
    disk.other.tidy(lambda _: pytest.fail("nothing is there"))
    assert asked == [{1}] * 4


def test_the_thread_copies_what_is_left_when_it_ends(disk: Disk) -> None:
    disk.mirror.start(lambda: 0.0)  # nothing settles
    file = disk.save()
    disk.mirror.close(lambda: 0.0, 1.0)
    assert disk.there() == {file.name, listing_name("secret", KEY)}
