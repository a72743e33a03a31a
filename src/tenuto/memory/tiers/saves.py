"""The state of sessions, kept on disk for the next process while the sessions are in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from tenuto.base.errors import InvariantError
from tenuto.base.views import SessionKey
from tenuto.memory.tiers.contents import Contents
from tenuto.memory.tiers.disk import DiskFailed, Listing, Run, UnitFile
from tenuto.memory.tiers.moves import Write
from tenuto.memory.tiers.parked import Parked, StoredUnit, size_of
from tenuto.memory.tiers.runs import runs_of, usable_places
from tenuto.memory.tiers.tiers import Tiers
from tenuto.memory.tiers.writes import group_of

RETRY_SECONDS = 1.0
"""The time between two attempts to write an index that could not be written."""


@dataclass(eq=False, slots=True)
class Save:
    """Units of session `key` on their way to disk. Once the index lists them, `record` stands at `position`: the first
    `stay` of its units of each group stay, and `units` follow. `void`: the session was cut meanwhile, so the record
    stays as it is, and the index is corrected."""

    key: SessionKey
    record: Parked
    position: int
    stay: Sequence[int]
    units: list[list[StoredUnit]]
    void: bool = False


@dataclass(slots=True)
class _Layout:
    """The units of a write by file: those that never change, those of windows, and those of a single position. A file
    is removed once none of its units is needed, so units that are needed equally long go to the same file."""

    page: int
    batches: list[list[StoredUnit]] = field(default_factory=lambda: [[], [], []])

    def add(self, unit: StoredUnit, *, lasting: bool) -> None:
        whole = unit.content.length == self.page
        self.batches[0 if lasting and whole else 1 if whole else 2].append(unit)

    def written(self) -> list[list[StoredUnit]]:
        return [sorted(batch, key=group_of) for batch in self.batches if batch]


class Saves:
    """Records of sessions' state on disk, in an index for the next process.

    A write has the units of one or several sessions, and the changes of the index since the last one. It succeeds or
    fails as a whole.

    Invariants: every unit that the index lists is in a file that some record refers to, or of a record that was
    discarded and is in `_changes`. A record changes only after the index: until its new units are listed it keeps the
    old ones, so at any instant a kill leaves one or the other. At most one write is under way.
    """

    def __init__(self, tiers: Tiers, page_size: int, lasting: Sequence[bool]) -> None:
        """`lasting`: for each group, whether a session keeps all of its units as it grows."""
        self._tiers = tiers
        self._page_size = page_size
        self._lasting = lasting
        self._lasting_groups = [group for group, keeps in enumerate(lasting) if keeps]
        self._records: dict[SessionKey, Parked] = {}
        self._saves: dict[Parked, Save] = {}  # of the write under way, or of the next one, by record
        self._gathered: dict[StoredUnit, None] = {}  # the units of the next write that are in no file
        self._changes: dict[SessionKey, Listing] = {}  # of the index, to be made next
        self._write: tuple[Write, dict[SessionKey, Listing]] | None = None  # under way, with changes of other sessions
        self._retry_at = 0.0
        self._has_index = False  # whether the index has been begun; without `recover` at the first save
        self.saved_bytes = 0  # total number of bytes written for saves
        self.outcomes: Counter[str] = Counter()  # records of an earlier process, see `recover` and `learn`

    def __len__(self) -> int:
        self._note_discarded()
        return len(self._records)

    def record(self, key: SessionKey) -> Parked | None:
        """Returns the record of a session, which may be unread."""
        record = self._records.get(key)
        return record if record in self._tiers else None

    def reaches(self, key: SessionKey) -> int:
        """Returns the number of tokens of a session whose state is saved or on its way, in some group."""
        record = self.record(key)
        if record is None:
            return 0
        save = self._saves.get(record)
        reached = [self._covered(record, group) for group in self._lasting_groups]
        return max([record.position, save.position if save is not None else 0, *reached])

    def next_part(
        self, record: Parked | None, counts: Sequence[int], position: int, most: int
    ) -> tuple[bool, int, list[tuple[int, int]]]:
        """Returns the next part to save of a state at `position`, which has `counts` units of each group: whether it is
        the last, the position whose units it has, and the first and the end of its units of each group. All but the
        last have only pages that never change, about `most` bytes or one page."""
        there = min((self._whole_pages(record, group) for group in self._lasting_groups), default=0)
        page_bytes = sum(self._tiers.copies.unit_bytes(group) for group in self._lasting_groups)
        pages = there + max(1, most // max(1, page_bytes))
        last = not self._lasting_groups or pages * self._page_size >= position
        firsts = [there if lasting else 0 for lasting in self._lasting]
        if last:
            return True, position, list(zip(firsts, counts, strict=True))
        old = [len(units) for units in record.units] if record is not None else [0] * len(counts)
        ranges = [(there, pages) if lasting else (old[group],) * 2 for group, lasting in enumerate(self._lasting)]
        return False, pages * self._page_size, ranges

    def _whole_pages(self, record: Parked | None, group: int) -> int:
        """Returns the number of leading units of `group` in a record that are complete."""
        if record is None:
            return 0
        whole = self._covered(record, group) // self._page_size
        return min(whole, record.position // self._page_size) if all(self._lasting) else whole

    def _covered(self, record: Parked, group: int) -> int:
        """Returns the number of tokens whose state the units of a lasting `group` hold."""
        units = record.units[group]
        return (len(units) - 1) * self._page_size + units[-1].content.length if units else 0

    # -- saving

    def under_way(self, key: SessionKey) -> bool:
        """Whether state of a session is being written, or is to be written next."""
        record = self.record(key)
        return record is not None and record in self._saves

    @property
    def gathered(self) -> tuple[int, int]:
        """The number of sessions in the next write, and of the bytes that it writes."""
        return len(self._saves), size_of(self._gathered)

    def add(self, key: SessionKey, position: int, stay: Sequence[int], units: list[list[StoredUnit]]) -> bool:
        """Adds `units` of a session, by group and none of them `leaving`, to the next write, as `Save` says; the
        caller's references to them pass on. Returns False if the disk has no room for them. Nothing may be under
        way, and the write must begin in the same step."""
        new = Parked(0, [[] for _ in units], key=key)
        record = self.record(key) or new
        fresh = self._gathered | dict.fromkeys(unit for unit in chain(*units) if unit.file is None)
        record.pinned, pinned = True, record.pinned
        if not self._tiers.make_room(size_of(fresh), record):
            self._tiers.failures["full"] += 1
            record.pinned = pinned
            self._tiers.copies.release(chain(*units))
            return False
        if record is new:
            self._records[key] = record
            self._tiers.add(record)
        self._gathered = fresh
        self._saves[record] = Save(key, record, position, stay, units)
        return True

    def advance(self, now: float) -> bool:
        """Processes what has ended. Returns whether a write may begin."""
        self._tiers.take_written()
        self._note_discarded()
        if self._write is not None and self._write[0] not in self._tiers.writes:
            (write, changes), self._write = self._write, None
            if write.failure and changes:
                self._changes = {**changes, **self._changes}
                self._retry_at = now + RETRY_SECONDS
            saves, self._saves = self._saves, {}
            for save in saves.values():
                self._finish(save, failed=bool(write.failure))
            self._note_discarded()
        return self._write is None and (not self._changes or now >= self._retry_at)

    def begin(self) -> int:
        """Begins to write what was added, and to change the index accordingly. Returns the number of bytes of units."""
        self._note_discarded()
        if not self._saves and not self._changes:
            return 0
        if not self._has_index:
            self._has_index = True
            self._tiers.clear_index()
        changes, self._changes = self._changes, {}
        size, units, self._gathered = size_of(self._gathered), self._gathered, {}
        self._write = self._begin(units, list(self._saves.values()), list(changes.values())), changes
        self.saved_bytes += size
        self._tiers.take_written()
        return size

    def _begin(self, units: Iterable[StoredUnit], saves: Sequence[Save], changes: Sequence[Listing]) -> Write:
        """Begins to write `units`, and then to let the index list `changes` and the saves."""
        layout = _Layout(self._page_size)
        for unit in units:
            layout.add(unit, lasting=self._lasting[unit.group])
        batches = layout.written()
        rows = {
            unit: (number, row)
            for number, batch in enumerate(batches)
            for group in range(len(self._lasting))
            for row, unit in enumerate(each for each in batch if each.group == group)
        }
        listings = [_Listed.of(save, rows) for save in saves]
        return self._tiers.begin_write(batches, lambda files: [*changes, *(each.listing(files) for each in listings)])

    def _finish(self, save: Save, *, failed: bool) -> None:
        record = save.record
        record.pinned = False
        if failed or record not in self._tiers:
            self._tiers.copies.release(chain(*save.units))
            if record in self._tiers and not any(record.units):
                self._tiers.forget(record)
            return
        if save.void:
            self._tiers.copies.release(chain(*save.units))
            self._list_again(record, save.stay)
            return
        for units, stay, new in zip(record.units, save.stay, save.units, strict=True):
            old = units[stay:]
            units[stay:] = new
            self._tiers.copies.release(old)
        record.position = save.position
        self._tiers.use(record)

    def _list_again(self, record: Parked, stay: Sequence[int]) -> None:
        """Lets the index list the record as it is; the first `stay` units of each group are listed, if it has them."""
        if record.key is None:
            return
        stay = [min(kept, len(units)) for kept, units in zip(stay, record.units, strict=True)]
        others = chain(*(units[kept:] for kept, units in zip(stay, record.units, strict=True)))
        there = [(unit, unit.file) for unit in others if unit.file is not None]
        runs = runs_of(((unit.group, file.name, unit.row, unit.content.mark) for unit, file in there), stay)
        sizes = {file.name: file.size for _, file in there}
        self._changes[record.key] = Listing(record.key, record.position, stay, runs, sizes)

    def _note_discarded(self) -> None:
        """Lets the index follow records that were discarded, for whatever reason."""
        discarded, self._tiers.unlisted = self._tiers.unlisted, []
        for record in discarded:
            if record.key is not None and self._records.get(record.key) is record:
                del self._records[record.key]
                self._changes[record.key] = Listing(record.key, None)

    def settle(self, now: float) -> None:
        """Waits until nothing is under way, and all changes of the index have been tried once."""
        while (self.advance(now) and self.begin()) or self._write is not None:
            self._tiers.writes.wait()

    # -- changes of sessions

    def forget(self, key: SessionKey) -> None:
        """Discards the record of a session."""
        record = self._records.get(key)
        if record is not None:
            self._tiers.forget(record)
            self._note_discarded()

    def forget_all(self) -> None:
        """Discards all records, also those of sessions that have left."""
        for key in list(self._records):
            self.forget(key)

    def cut(self, key: SessionKey, position: int, stay: Sequence[int]) -> None:
        """Cuts the record of a session, which is not unread, to `position`, where the first `stay` units of each group
        are kept."""
        record = self.record(key)
        if record is None:
            return
        save = self._saves.get(record)
        if save is not None and save.position > position:
            save.void = True
        if record.position <= position:
            return
        for units, kept in zip(record.units, stay, strict=True):
            self._tiers.copies.release(units[kept:])
            del units[kept:]
        record.position = position
        self._changes[key] = Listing(key, position, stay)

    # -- from one process to the next

    def recover(self, longest: Mapping[SessionKey, int], *, whole: bool) -> None:
        """Finds the records that an earlier process has left of the sessions in `longest`, which are in the order of
        their last use, each with the most tokens that its history allows; with `whole`, a record can be used only as a
        whole. Everything else is removed from disk. Reads no files of units. Counts `outcomes`: "restored", "partly"
        (fewer tokens), "stale" (unusable) and "missing" (the files). Raises `IndexUnusable`, having removed all."""
        disk, self._has_index = self._tiers.disk, True
        if disk is None:
            return
        try:
            listed = disk.index.begin(self._tiers.meaning)
            there = disk.files() if listed else set[str]()
            files: dict[str, UnitFile] = {}
            for key, most in longest.items():
                if (found := listed.pop(key, None)) is None:
                    continue
                wanted = [
                    files.setdefault(name, UnitFile(name, size, 0)) for name, size in found.files if name in there
                ]
                usable = found.position if found.position <= most else 0 if whole else most
                missing = not wanted or (whole and len(wanted) < len(found.files))
                if found.position and (missing or not usable):
                    self.outcomes["missing" if missing else "stale"] += 1
                if missing or not usable:
                    self._changes[key] = Listing(key, None)
                    continue
                for file in wanted:
                    file.wanted += 1
                groups = len(self._lasting)
                self._records[key] = Parked(usable, [[] for _ in range(groups)], key=key, unread=tuple(wanted))
                self.outcomes["restored" if usable == found.position else "partly"] += 1
            self._changes.update((key, Listing(key, None)) for key in listed)
        finally:
            self._tiers.take_over(self._records.values())
            self._note_discarded()

    def learn(self, key: SessionKey, names: Contents, *, whole: bool) -> Parked | None:
        """Reads the units of an unread record from the index; `names` are the contents that they must have, by group,
        for the record's position. Returns the record, which may have become shorter, or `None` if it is unusable and
        was discarded."""
        record = self.record(key)
        if record is None or not record.unread:
            return record
        places, whole_pages = usable_places(self._runs(record), record.unread, names, whole=whole)
        if whole_pages is not None:
            record.position = whole_pages * self._page_size
        units = self._tiers.copies.find(list(chain(*places))) if record.position else None
        if units is None:
            self.outcomes["stale"] += 1
            self.forget(key)
            return None
        for unit in units:
            record.units[unit.group].append(unit)
        self._tiers.forget_files(record)
        return record

    def _runs(self, record: Parked) -> Sequence[Run]:
        disk = self._tiers.disk
        try:
            return disk.index.runs(record.key) if disk is not None and record.key is not None else []
        except DiskFailed as error:
            self._tiers.failures[error.cause] += 1
            return []

    # -- erasing

    @property
    def unlisted(self) -> bool:
        """Whether the index has yet to follow changes of records."""
        return bool(self._changes)

    def by_session(self) -> Iterator[tuple[str, Parked]]:
        """Yields the ids of sessions with records, and the records."""
        return ((session_id, record) for (_, session_id), record in self._records.items())

    def unread_rows(self) -> Iterator[tuple[UnitFile, set[tuple[int, int]]]]:
        """Yields the files of unread records, each with the groups and rows that the index lists for it. Raises
        `DiskFailed`."""
        disk = self._tiers.disk
        for key, record in self._records.items():
            if record.unread and disk is not None:
                runs = disk.index.runs(key)
                for file in record.unread:
                    same = [run for run in runs if run.file == file.name]
                    yield file, {(run.group, run.row + i) for run in same for i in range(run.number)}

    # -- audit

    def units(self) -> Iterator[StoredUnit]:
        """Yields the units of the saves under way, once for each reference."""
        return chain.from_iterable(chain(*save.units) for save in self._saves.values())

    def audit(self) -> None:
        """Raises `InvariantError` if the records are inconsistent."""
        for key, record in self._records.items():
            if record.key != key or record not in self._tiers:
                raise InvariantError(f"the saved state of session {key} was discarded, but is still listed")
            if any(unit.file is None for unit in record):
                raise InvariantError(f"the saved state of session {key} is not on disk")


class _Listed(NamedTuple):
    """A save's units for the index: the group, place and mark of each, and the sizes of the files that they are in. The
    place is a file's name or the number of a file that is to be written, and a row."""

    save: Save
    places: Sequence[tuple[int, str | int, int, bytes]]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, save: Save, rows: Mapping[StoredUnit, tuple[int, int]]) -> _Listed:
        """Returns the units of a save; `rows`: the numbers of files and rows of those that are to be written."""
        places: list[tuple[int, str | int, int, bytes]] = []
        sizes: dict[str, int] = {}
        for unit in chain(*save.units):
            file, row = rows[unit] if unit.file is None else (unit.file.name, unit.row)
            places.append((unit.group, file, row, unit.content.mark))
            if unit.file is not None:
                sizes[unit.file.name] = unit.file.size
        return cls(save, places, sizes)

    def listing(self, files: Sequence[UnitFile]) -> Listing:
        """Returns the change of the index once these files have been written. Any thread may call this."""
        found = [
            (group, files[at].name if isinstance(at, int) else at, row, mark) for group, at, row, mark in self.places
        ]
        sizes = {**self.sizes, **{file.name: file.size for file in files}}
        key, position, stay = self.save.key, self.save.position, self.save.stay
        return Listing(key, position, stay, runs_of(iter(found), stay), sizes)
