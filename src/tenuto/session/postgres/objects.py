"""Objects in the database of a fleet, such as conversations, which every replica can read and change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenuto.base.objects import ItemPage, NewItem, ObjectEdit, ObjectItem, ObjectKey, ObjectsUse, StoredObject
from tenuto.session.journal_rows import Value, check, checksum_of
from tenuto.session.postgres.database import Database
from tenuto.session.postgres.replicas import LIVE

ROWS = 200
"""The most items in one statement."""
_KEY = "tenant = ? AND kind = ? AND name = ?"
_ABANDONED = f"worker IS NOT NULL AND worker NOT IN (SELECT id FROM replicas WHERE {LIVE})"
_OBJECT = f"name, revision, head, size, worker, {_ABANDONED}, tenant, kind, checksum"


class Objects:
    """The objects of all tenants. One thread uses it at a time.

    Invariant: an object is changed only in a transaction that has found it with the revision that the change expects,
    and keeps its row locked. No two changes leave the same revision. So an object is the result of one sequence of
    changes, each made by someone who had seen the one before. And an object with a change's own revision shows that the
    change was carried out, so it is not carried out again.
    """

    def __init__(self, db: Database) -> None:
        """`db`: a connection for this object alone."""
        self.db = db

    def find(self, key: ObjectKey) -> StoredObject | None:
        """Returns an object, or `None` if it does not exist. Raises errors of damage."""
        row = self.db.execute(f"SELECT {_OBJECT} FROM objects WHERE {_KEY}", key).fetchone()
        return _object(row) if row is not None else None

    def listed(self, tenant: str, kind: str, most: int | None) -> list[StoredObject]:
        """Returns a tenant's objects of one kind, the oldest first. Raises errors of damage."""
        query = f"SELECT {_OBJECT} FROM objects WHERE tenant = ? AND kind = ? ORDER BY id LIMIT ?"
        return [_object(row) for row in self.db.execute(query, (tenant, kind, most))]

    def use(self, tenant: str, kind: str) -> ObjectsUse:
        """Counts a tenant's objects of one kind."""
        query = "SELECT count(*), coalesce(sum(size), 0)::bigint FROM objects WHERE tenant = ? AND kind = ?"
        objects, size = self.db.execute(query, (tenant, kind)).fetchone()
        return ObjectsUse(objects=objects, size=size)

    def items(
        self, key: ObjectKey, part: str, most: int, after: str | None = None, *, newest_first: bool = False
    ) -> ItemPage | None:
        """See `ListItems`. Raises errors of damage."""
        with self.db.transaction():
            query = f"SELECT id, revision FROM objects WHERE {_KEY} FOR SHARE"
            if (found := self.db.execute(query, key).fetchone()) is None:
                return None
            number, revision = found
            order, beyond, first = ("DESC", "<", 2**63 - 1) if newest_first else ("ASC", ">", 0)
            if after is not None:
                query = "SELECT number FROM items WHERE object = ? AND part = ? AND name = ?"
                if (at := self.db.execute(query, (number, part, after)).fetchone()) is None:
                    return ItemPage(revision=revision, items=[], found=False)
                (first,) = at
            query = (
                f"SELECT name, body, checksum FROM items WHERE object = ? AND part = ? AND number {beyond} ? "
                f"ORDER BY number {order} LIMIT ?"
            )
            rows = self.db.execute(query, (number, part, first, most + 1)).fetchall()
        items = [_item(number, part, *row) for row in rows[:most]]
        return ItemPage(revision=revision, items=items, more=len(rows) > most)

    def abandoned(self, kind: str) -> list[ObjectKey]:
        """Returns the objects with a `worker` whose lease has ended."""
        query = f"SELECT tenant, kind, name FROM objects WHERE kind = ? AND {_ABANDONED} ORDER BY id"
        return [ObjectKey(*row) for row in self.db.execute(query, (kind,))]

    def edit(self, key: ObjectKey, edit: ObjectEdit, *, again: bool = False) -> bool:
        """Changes an object, whole or not at all. Returns whether it was changed, now or by the same change before.
        `again`: the same change was tried before."""
        with self.db.transaction():
            query = f"SELECT id, revision, size, octet_length(head) FROM objects WHERE {_KEY} FOR UPDATE"
            found = self.db.execute(query, key).fetchone()
            if found is not None and found[1] == edit.revision:
                return True
            if (found[1] if found is not None else "") != edit.expected:
                return again and found is None and edit.head is None
            if found is None:
                return edit.head is None or self._create(key, edit, edit.head)
            number, _, size, head = found
            if edit.head is None:
                self.db.execute("DELETE FROM items WHERE object = ?", (number,))
                self.db.execute("DELETE FROM objects WHERE id = ?", (number,))
                return True
            size += len(edit.head) - head - self._remove(number, edit) + self._add(number, edit.added)
            self._update(number, key, edit, edit.head, size)
        return True

    def _create(self, key: ObjectKey, edit: ObjectEdit, head: bytes) -> bool:
        row = (*key, edit.revision, head, 0, edit.worker, 0)
        names = "tenant, kind, name, revision, head, size, worker, checksum"
        values = ", ".join("?" * len(row))
        query = f"INSERT INTO objects ({names}) VALUES ({values}) ON CONFLICT DO NOTHING RETURNING id"
        if (found := self.db.execute(query, row).fetchone()) is None:  # another one has just created it
            return False
        (number,) = found
        self._update(number, key, edit, head, len(head) + self._add(number, edit.added))
        return True

    def _update(self, number: int, key: ObjectKey, edit: ObjectEdit, head: bytes, size: int) -> None:
        query = "UPDATE objects SET revision = ?, head = ?, size = ?, worker = ?, checksum = ? WHERE id = ?"
        checksum = checksum_of(*key, edit.revision, head, size, edit.worker)
        self.db.execute(query, (edit.revision, head, size, edit.worker, checksum, number))

    def _remove(self, number: int, edit: ObjectEdit) -> int:
        """Removes items; returns their bytes."""
        size = 0
        for part in edit.emptied:
            query = "DELETE FROM items WHERE object = ? AND part = ? RETURNING octet_length(body)"
            size += sum(length for (length,) in self.db.execute(query, (number, part)))
        for part, name in edit.removed:
            query = "DELETE FROM items WHERE object = ? AND part = ? AND name = ? RETURNING octet_length(body)"
            size += sum(length for (length,) in self.db.execute(query, (number, part, name)))
        return size

    def _add(self, number: int, items: Sequence[NewItem]) -> int:
        """Adds items, in order; returns their bytes."""
        for start in range(0, len(items), ROWS):
            rows = [(number, each.part, each.name, each.body) for each in items[start : start + ROWS]]
            values: list[Value] = [value for row in rows for value in (*row, checksum_of(*row))]
            places = ", ".join(["(?, ?, ?, ?, ?)"] * len(rows))
            self.db.execute(f"INSERT INTO items (object, part, name, body, checksum) VALUES {places}", values)
        return sum(len(each.body) for each in items)


def _object(row: Sequence[Any]) -> StoredObject:
    name, revision, head, size, worker, abandoned, tenant, kind, checksum = row
    check("objects", (tenant, kind, name, revision, head, size, worker), checksum)
    return StoredObject(name=name, revision=revision, head=head, size=size, worker=worker, abandoned=bool(abandoned))


def _item(number: int, part: str, name: str, body: bytes, checksum: int) -> ObjectItem:
    check("items", (number, part, name, body), checksum)
    return ObjectItem(name, body)
