"""The objects of a server without a fleet, in memory until it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from tenuto.base.objects import ItemPage, ObjectEdit, ObjectItem, ObjectKey, ObjectsUse, StoredObject
from tenuto.base.wire.fleet_messages import CountObjects, EditObject, FindObject, ListAbandoned, ListItems, ListObjects
from tenuto.base.wire.request import Request

T = TypeVar("T")


@dataclass(slots=True)
class _Object:
    stored: StoredObject
    parts: dict[str, dict[str, bytes]] = field(default_factory=dict)  # the lists of items, by name


class LocalObjects:
    """Answers requests about objects as the database of a fleet does, but at once, without giving way to other tasks.

    Invariant: `_by_kind` has the objects by tenant and kind, the oldest first, and `_sizes` their sizes.
    """

    def __init__(self) -> None:
        self._by_kind: dict[tuple[str, str], dict[str, _Object]] = {}
        self._sizes: dict[tuple[str, str], int] = {}

    async def ask(self, request: Request[T]) -> T:
        """Answers a request."""
        return cast("T", self._answer(request))

    def _answer(self, request: Request[Any]) -> Any:
        match request:
            case FindObject(key=key):
                found = self._find(key)
                return found.stored if found is not None else None
            case ListObjects(tenant=tenant, kind=kind, most=most):
                return [each.stored for each in list(self._of(tenant, kind).values())[:most]]
            case CountObjects(tenant=tenant, kind=kind):
                return ObjectsUse(objects=len(self._of(tenant, kind)), size=self._sizes.get((tenant, kind), 0))
            case ListItems():
                return self._items(request)
            case EditObject(key=key, edit=edit):
                return self._edit(key, edit)
            case ListAbandoned():
                return []
        raise AssertionError(f"{type(request).__name__} is not about objects")

    def _of(self, tenant: str, kind: str) -> dict[str, _Object]:
        return self._by_kind.get((tenant, kind), {})

    def _find(self, key: ObjectKey) -> _Object | None:
        return self._of(key.tenant, key.kind).get(key.name)

    def _items(self, request: ListItems) -> ItemPage | None:
        if (found := self._find(request.key)) is None:
            return None
        items, revision = found.parts.get(request.part, {}), found.stored.revision
        names = list(items)[::-1] if request.newest_first else list(items)
        start = 0
        if request.after is not None:
            if request.after not in items:
                return ItemPage(revision=revision, items=[], found=False)
            start = names.index(request.after) + 1
        page = names[start : start + request.most]
        listed = [ObjectItem(name, items[name]) for name in page]
        return ItemPage(revision=revision, items=listed, more=start + len(page) < len(names))

    def _edit(self, key: ObjectKey, edit: ObjectEdit) -> bool:
        found, kind = self._find(key), (key.tenant, key.kind)
        if (found.stored.revision if found is not None else "") != edit.expected:
            return False
        before = found.stored.size if found is not None else 0
        if edit.head is None:
            self._of(*kind).pop(key.name, None)
            self._sizes[kind] = self._sizes.get(kind, 0) - before
            return True
        size = before + len(edit.head) - (len(found.stored.head) if found is not None else 0)
        parts = found.parts if found is not None else {}
        for part in edit.emptied:
            size -= sum(map(len, parts.pop(part, {}).values()))
        for part, name in edit.removed:
            size -= len(parts.get(part, {}).pop(name, b""))
        for item in edit.added:
            parts.setdefault(item.part, {})[item.name] = item.body
            size += len(item.body)
        stored = StoredObject(name=key.name, revision=edit.revision, head=edit.head, size=size, worker=edit.worker)
        if found is not None:
            found.stored = stored
        else:
            self._by_kind.setdefault(kind, {})[key.name] = _Object(stored, parts)
        self._sizes[kind] = self._sizes.get(kind, 0) + size - before
        return True
