"""Objects that clients keep besides sessions, such as conversations: a head, and lists of items.

An object has no owner. A change names the revision on which it is based. It is carried out as a whole if the object
still has that revision, and otherwise not at all.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

NOBODY = 0
"""The number of no replica. An object with this worker is left to the replica that finds it first."""


class ObjectKey(NamedTuple):
    """Identifies an object. `kind`: of which kind it is, such as `conversation`."""

    tenant: str
    kind: str
    name: str


class ItemName(NamedTuple):
    """Identifies an item of an object. `part`: the list that the item is in."""

    part: str
    name: str


class ObjectItem(msgspec.Struct, frozen=True, array_like=True):
    """An item of an object."""

    name: str
    body: bytes


class NewItem(msgspec.Struct, frozen=True, array_like=True):
    """An item to add at the end of a list."""

    part: str
    name: str
    body: bytes


class StoredObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object without its items. `revision`: different after each change. `head`: encoded; its contents depend on the
    kind. `size`: bytes of the head and of all items. `worker`: the replica that works on it; `None` if there is nothing
    to do. `abandoned`: whether that replica's lease has ended."""

    name: str
    revision: str
    head: bytes
    size: int
    worker: int | None = None
    abandoned: bool = False


class ObjectEdit(msgspec.Struct, frozen=True, kw_only=True):
    """A change of an object. `expected`: the revision that the object must have; empty if there must be none of its
    name. `revision`: the one it has then, which no other change has. `head`: the new head; `None` deletes the object.
    `worker`: see `StoredObject`. `emptied`: lists to empty. `removed`: items to remove; missing ones are fine. `added`:
    items to add after that."""

    expected: str
    revision: str
    head: bytes | None
    worker: int | None = None
    emptied: list[str] = []
    removed: list[ItemName] = []
    added: list[NewItem] = []


class ItemPage(msgspec.Struct, frozen=True, kw_only=True):
    """Items of an object in one list. `revision`: that of the object. `found`: whether there is the item after which
    the page begins. `more`: whether others follow."""

    revision: str
    items: list[ObjectItem]
    found: bool = True
    more: bool = False


class ObjectsUse(msgspec.Struct, frozen=True, kw_only=True):
    """The number of a tenant's objects of one kind, and their `size` in bytes."""

    objects: int
    size: int
