"""The files of a disk tier's index, of which nothing remains once a session is erased."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from tenuto.memory.tiers.disk import DiskFailed, Listing, Run
from tenuto.memory.tiers.state_index import StateIndex

MARKS = array("Q", [0x5EC2E7])
MANY = 300
"""Sessions, which take many pages of the index."""


def listing(name: str, marks: bytes = bytes(8)) -> Listing:
    return Listing(("tenant", name), 16, (0,), (Run(0, 0, "a file", 0, 1, marks),), {"a file": 100})


def in_files(path: Path, data: bytes) -> bool:
    return any(data in each.read_bytes() for each in path.parent.iterdir())


def test_nothing_is_left_of_removed_listings_once_the_log_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = StateIndex(path)
    index.begin("identity")
    index.apply([listing(f"stays {i}") for i in range(MANY)])
    gone = [f"goes away {i}" for i in range(MANY)]
    index.apply([listing(name, MARKS.tobytes()) for name in gone])
    assert in_files(path, b"goes away")
    assert in_files(path, MARKS.tobytes())
    index.apply([Listing(("tenant", name), None) for name in gone])
    assert in_files(path, b"goes away")
    index.empty_log()
    assert not in_files(path, b"goes away")
    assert not in_files(path, MARKS.tobytes())
    assert in_files(path, b"stays 299")
    index.close()


def test_a_log_that_another_program_reads_is_not_reported_as_empty(tmp_path: Path) -> None:
    index, reader = StateIndex(tmp_path / "index"), StateIndex(tmp_path / "index")
    index.begin("identity")
    index.apply([listing("goes")])
    reading = reader._connection("read").execute("SELECT name FROM sessions UNION ALL SELECT name FROM files")
    assert next(reading) == ("goes",)
    index.apply([Listing(("tenant", "goes"), None)])
    index._connection("write").execute("PRAGMA busy_timeout = 0")
    with pytest.raises(DiskFailed, match="another program reads it"):
        index.empty_log()
    reading.close()
    index.empty_log()
    index.close()
    reader.close()
