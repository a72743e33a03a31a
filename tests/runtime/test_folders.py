"""Folders of replicas that are gone: what they hold, and when they are removed."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pytest

from tenuto.memory.tiers.contents import Content, NamedUnit
from tenuto.memory.tiers.disk import DiskFailed, IndexUnusable, Listing, Run
from tenuto.memory.tiers.left_state import Wanted
from tenuto.memory.tiers.state_index import StateIndex
from tenuto.memory.tiers.unit_files import INDEX, UnitFiles
from tenuto.runtime.folders import Folders

KEY = "tenant", "s"
MEANING, IDENTITY = "units of a model", "a model"
PAGE, UNIT = 2, 16


def contents(before: bytes = b"digest of before") -> list[Content]:
    return [Content(before, np.array([2 * n, 2 * n + 1], "<i4").tobytes()) for n in range(3)]


def wanted(**changes: object) -> Wanted:
    about: dict[str, object] = {
        "version": 1,
        "position": 6,
        "names": [contents()],
        "unit_bytes": [UNIT],
        "page_size": PAGE,
        "whole": False,
        "meaning": MEANING,
        "identity": IDENTITY,
    }
    return Wanted(**{**about, **changes})  # type: ignore[arg-type]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path, "secret", 2)


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Path]:
    """The folder of replica 1, which saved three units of a session; its process goes on."""
    path = Folders(tmp_path, "secret", 1).own
    files = UnitFiles(path, 10**6, IDENTITY)
    files.index.begin(MEANING)
    units = [NamedUnit(content, np.full(UNIT, n, np.uint8)) for n, content in enumerate(contents())]
    file = files.write({0: units})
    marks = b"".join(content.mark for content in contents())
    files.index.apply([Listing(KEY, 6, (0,), (Run(0, 0, file.name, 0, 3, marks),), {file.name: file.size})])
    yield path
    files.close(keep=True)


def read(folders: Folders, about: Wanted) -> tuple[int, list[list[int]]]:
    position, groups = folders.of(1, KEY).read(KEY, about)
    return position, [[int(unit[0]) for unit in group] for group in groups]


def test_state_of_a_replica_is_found_while_it_goes_on(folders: Folders, left: Path) -> None:
    assert folders.of(1, KEY).reaches(KEY) == 6
    assert folders.of(1, KEY).reaches(("tenant", "another")) == 0
    assert read(folders, wanted()) == (6, [[0, 1, 2]])


def test_state_that_is_listed_later_is_found(folders: Folders, left: Path) -> None:
    assert folders.of(1, KEY).reaches(("tenant", "t")) == 0
    index = StateIndex(left / INDEX)
    index.apply([Listing(("tenant", "t"), 4, (0,), (), {})])
    index.close()
    assert folders.of(1, KEY).reaches(("tenant", "t")) == 4


def test_units_of_other_tokens_are_not_read(folders: Folders, left: Path) -> None:
    names = [[*contents()[:2], Content(b"digest of others", contents()[2].tokens)]]
    assert names[0][2].mark == contents()[2].mark  # so only the file shows the difference
    with pytest.raises(DiskFailed, match="holds the state of other tokens"):
        read(folders, wanted(names=names))


@pytest.mark.parametrize(("whole", "found"), [(False, (2, [[0]])), (True, (0, [[]]))])
def test_a_beginning_is_used_if_the_rest_is_of_other_tokens(
    folders: Folders, left: Path, whole: bool, found: object
) -> None:
    names = [[*contents()[:2], Content(b"other digest here", contents()[2].tokens)]]
    assert read(folders, wanted(names=names, whole=whole)) == found


def test_units_of_another_meaning_identity_or_size_are_not_read(folders: Folders, left: Path) -> None:
    assert read(folders, wanted(meaning="other units")) == (0, [[]])
    with pytest.raises(DiskFailed, match="units of another model"):
        read(folders, wanted(identity="another model"))
    with pytest.raises(DiskFailed, match="units of another size"):
        read(folders, wanted(unit_bytes=[UNIT + 1]))


def test_a_file_or_an_index_that_is_missing_or_damaged_is_an_error(folders: Folders, left: Path) -> None:
    (file,) = left.glob("*.units")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(DiskFailed, match="damaged"):
        read(folders, wanted())
    file.unlink()
    with pytest.raises(DiskFailed, match="could not be read"):
        read(folders, wanted())
    (left / INDEX).write_bytes(b"no index")
    (left / f"{INDEX}-wal").unlink()
    with pytest.raises((DiskFailed, IndexUnusable)):
        folders.of(1, KEY).reaches(KEY)
    shutil.rmtree(left)
    with pytest.raises(IndexUnusable):
        folders.of(1, KEY)


def test_malformed_rows_of_an_index_are_an_error(folders: Folders, left: Path) -> None:
    index = StateIndex(left / INDEX)
    index._connection("write").execute("UPDATE sessions SET position = 'many'")
    index._connection("write").commit()
    index.close()
    with pytest.raises(DiskFailed, match="malformed"):
        folders.of(1, KEY).reaches(KEY)


def test_folders_that_nobody_needs_twice_in_a_row_are_removed(tmp_path: Path, folders: Folders) -> None:
    others = [Folders(tmp_path, "secret", 1).own, Folders(tmp_path, "secret", 3).own]
    foreign = Folders(tmp_path, "another secret", 1).own
    for path in (folders.own, *others, foreign):
        UnitFiles(path, 10**6).close(keep=True)
    (tmp_path / "of somebody else").mkdir()
    used = UnitFiles(Folders(tmp_path, "secret", 4).own, 10**6)
    asked: list[set[int]] = []

    def needed(replicas: Collection[int]) -> set[int]:
        asked.append(set(replicas))
        return {1} if len(asked) < 3 else set()

    def there() -> set[Path]:
        return {path for path in (*others, foreign, folders.own) if path.exists()}

    folders.tidy(needed)
    assert there() == {*others, foreign, folders.own}
    folders.tidy(needed)
    assert there() == {others[0], foreign, folders.own}
    folders.tidy(needed)  # for the first time, nobody needs the folder of replica 1
    assert there() == {others[0], foreign, folders.own}
    folders.tidy(needed)
    assert there() == {foreign, folders.own}
    assert asked == [{1, 3, 4}, {1, 3, 4}, {1, 4}, {1, 4}]
    assert Folders(tmp_path, "secret", 4).own.exists()  # a process uses it
    assert (tmp_path / "of somebody else").exists()
    used.close()


def test_nothing_is_removed_or_asked_without_a_directory(tmp_path: Path) -> None:
    Folders(tmp_path / "missing", "secret", 1).tidy(lambda _: pytest.fail("nothing is there"))
