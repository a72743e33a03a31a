"""The choice of parked memory that makes room on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from tenuto.memory.tiers.disk import UnitFile
from tenuto.memory.tiers.parked import Parked, StoredUnit

VICTIMS = 8
"""The number of least recently used records of which the one with the fewest tokens makes room first."""
LOOKED_AT = 100_000
"""The number of units after which records make room although others share what they have."""


def victims(records: Iterable[Parked], size: int) -> list[Parked]:
    """Returns those of `records`, which are in the order of their last use, that have to be discarded so that files of
    at least `size` bytes are removed. A file is removed only with its last unit, and a unit only with its last record,
    so records without which no file is removed stay. Returns nothing if not even all records make enough room. If many
    records share what they have, it returns those looked at so far, which may free less."""
    chosen: list[Parked] = []
    gone: Counter[StoredUnit] = Counter()  # ended references, by unit
    ended: Counter[UnitFile] = Counter()  # ended uses, by file
    removed: set[UnitFile] = set()
    freed = 0
    for record in _in_order(iter(records)):
        chosen.append(record)
        gone.update(record)
        last = (unit.file for unit in record if unit.file is not None and gone[unit] == unit.references)
        for file in chain(last, record.unread):
            ended[file] += 1
            if ended[file] == file.wanted:
                removed.add(file)
                freed += file.size
        if freed >= size:
            return [each for each in chosen if not removed.isdisjoint(_files(each))]
        if gone.total() > LOOKED_AT:
            return chosen
    return []


def _in_order(records: Iterator[Parked]) -> Iterator[Parked]:
    """Yields the least recently used records first, and of these the ones with the fewest tokens."""
    oldest = list(islice(records, VICTIMS))
    while oldest:
        record = min(oldest, key=lambda each: each.position)
        oldest.remove(record)
        oldest += islice(records, 1)
        yield record


def _files(record: Parked) -> set[UnitFile]:
    return {unit.file for unit in record if unit.file is not None} | set(record.unread)
