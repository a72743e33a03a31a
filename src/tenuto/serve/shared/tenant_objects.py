"""A tenant's objects: in memory or, in a fleet, in the database that all replicas share."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tenuto.base.objects import (
    ItemName,
    ItemPage,
    NewItem,
    ObjectEdit,
    ObjectItem,
    ObjectKey,
    ObjectsUse,
    StoredObject,
)
from tenuto.base.wire.fleet_messages import CountObjects, EditObject, FindObject, ListItems, ListObjects
from tenuto.base.wire.request import Request

T = TypeVar("T")

READ_AT_ONCE = 500
"""The most items that are read with one request."""


ONLY = "only"
"""The list, and the name, of an object's only item."""


class Ask(Protocol):
    """Has a request about objects carried out."""

    def __call__(self, request: Request[T], /) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of an object; see `ObjectEdit`."""

    head: bytes | None
    worker: int | None = None
    emptied: tuple[str, ...] = ()
    removed: list[ItemName] = field(default_factory=list)
    added: list[NewItem] = field(default_factory=list)


class TenantObjects:
    """The objects of one kind of a tenant. `worker`: the number of this replica, by which objects name it."""

    def __init__(self, ask: Ask, tenant: str, kind: str, worker: int) -> None:
        self.tenant = tenant
        self.worker = worker
        self._ask = ask
        self._kind = kind

    def key(self, name: str) -> ObjectKey:
        """Returns the key of an object."""
        return ObjectKey(self.tenant, self._kind, name)

    async def find(self, name: str) -> StoredObject | None:
        """Returns an object, or `None` if it does not exist."""
        return await self._ask(FindObject(key=self.key(name)))

    async def listed(self, most: int | None = None) -> list[StoredObject]:
        """Returns the objects, the oldest first."""
        return await self._ask(ListObjects(tenant=self.tenant, kind=self._kind, most=most))

    async def use(self) -> ObjectsUse:
        """Counts the objects."""
        return await self._ask(CountObjects(tenant=self.tenant, kind=self._kind))

    async def page(
        self, name: str, part: str, most: int, after: str | None = None, *, newest_first: bool = False
    ) -> ItemPage | None:
        """Returns items of an object; see `ListItems`."""
        asked = ListItems(key=self.key(name), part=part, most=most, after=after, newest_first=newest_first)
        return await self._ask(asked)

    async def items(self, name: str, part: str) -> list[ObjectItem]:
        """Returns all items of a list as they were at one moment; no items if the object does not exist."""
        found: list[ObjectItem] = []
        revision = ""
        while (page := await self.page(name, part, READ_AT_ONCE, found[-1].name if found else None)) is not None:
            if found and (page.revision != revision or not page.found):
                found = []  # it has changed meanwhile
                continue
            revision = page.revision
            found += page.items
            if not page.more:
                return found
        return []

    async def only_item(self, name: str) -> bytes | None:
        """Returns the item of an object made by `create`, or `None` if the object does not exist."""
        page = await self.page(name, ONLY, 1)
        return page.items[0].body if page is not None and page.items else None

    async def create(self, name: str, head: bytes, item: bytes) -> None:
        """Creates an object with one item, unless an object has its name already."""
        await self.edit(name, "", Edit(head, added=[NewItem(ONLY, ONLY, item)]))

    async def drop_oldest(self, objects: int, size: int) -> None:
        """Deletes the oldest objects until there are at most so many, of at most this size."""
        while (used := await self.use()).objects > objects or used.size > size:
            for each in await self.listed(max(1, used.objects - objects)):
                await self.delete(each.name)

    async def edit(self, name: str, expected: str, edit: Edit) -> str | None:
        """Changes an object that has the revision `expected`; "" if it must not exist yet. Returns the new revision, or
        `None` if the object has another revision. Raises `NotAcknowledged` if the outcome is unknown."""
        whole = new_edit(expected, edit)
        return whole.revision if await self.carry_out(name, whole) else None

    async def carry_out(self, name: str, edit: ObjectEdit) -> bool:
        """Carries out an edit; may be repeated. Returns whether it was carried out. Raises `NotAcknowledged` if that is
        unknown."""
        return await self._ask(EditObject(key=self.key(name), edit=edit))

    async def change(self, name: str, make: Callable[[StoredObject | None], Edit | None]) -> None:
        """Carries out the edit that `make` returns for the present object, or for `None` if it does not exist. If the
        object has changed meanwhile, calls `make` again. `make` may raise, or return `None`, to leave the object as it
        is."""
        while True:
            found = await self.find(name)
            edit = make(found)
            if edit is None or await self.edit(name, found.revision if found is not None else "", edit) is not None:
                return

    async def delete(self, name: str) -> bool:
        """Deletes an object; returns whether there was one."""
        there = False

        def gone(found: StoredObject | None) -> Edit | None:
            nonlocal there
            there = found is not None
            return Edit(None) if found is not None else None

        await self.change(name, gone)
        return there


def new_edit(expected: str, edit: Edit) -> ObjectEdit:
    """Returns an edit of an object with the revision `expected`, which leaves a new revision."""
    return ObjectEdit(
        expected=expected,
        revision=secrets.token_hex(12),
        head=edit.head,
        worker=edit.worker,
        emptied=list(edit.emptied),
        removed=edit.removed,
        added=edit.added,
    )
