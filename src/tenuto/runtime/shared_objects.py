"""The objects that all replicas of a fleet share, read and changed in a separate thread over its own connection."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tenuto.base.errors import NotAcknowledged, ObjectDamaged
from tenuto.base.wire.fleet_messages import CountObjects, EditObject, FindObject, ListAbandoned, ListItems, ListObjects
from tenuto.runtime.answering import answered
from tenuto.session.journal_rows import DAMAGE
from tenuto.session.postgres.objects import Objects

OfObjects = FindObject | ListObjects | CountObjects | ListItems | EditObject | ListAbandoned
"""Requests about objects."""
TRIES = 3
"""How often a request is tried: a connection may have broken since the last one."""


class SharedObjects:
    """Carries out requests about objects, one after the other."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._thread = ThreadPoolExecutor(1, "tenuto-objects")

    def close(self) -> None:
        """Carries out the requests so far, and ends."""
        self._thread.shutdown()
        self._objects.db.close()

    def take(self, request: OfObjects, answer: Callable[[Any], None], refuse: Callable[[BaseException], None]) -> None:
        """Answers a request later. Refuses it with `NotAcknowledged` if the database cannot be asked."""
        self._thread.submit(answered, partial(self.carry_out, request), answer, refuse)

    def carry_out(self, request: OfObjects) -> Any:
        """Carries out a request. Raises `NotAcknowledged`, and `ObjectDamaged`."""
        for tries in range(TRIES):
            try:
                return self._once(request, again=tries > 0)
            except self._objects.db.errors as error:
                failure = error
            except DAMAGE as error:
                raise ObjectDamaged(
                    f"an object is damaged in the database {self._objects.db.place}: {error}"
                ) from error
        raise NotAcknowledged(f"the database {self._objects.db.place} cannot be asked: {failure}") from failure

    def _once(self, request: OfObjects, *, again: bool) -> Any:
        objects = self._objects
        match request:
            case FindObject(key=key):
                return objects.find(key)
            case ListObjects(tenant=tenant, kind=kind, most=most):
                return objects.listed(tenant, kind, most)
            case CountObjects(tenant=tenant, kind=kind):
                return objects.use(tenant, kind)
            case ListItems(key=key, part=part, most=most, after=after, newest_first=newest_first):
                return objects.items(key, part, most, after, newest_first=newest_first)
            case EditObject(key=key, edit=edit):
                return objects.edit(key, edit, again=again)
            case ListAbandoned(kind=kind):
                return objects.abandoned(kind)
