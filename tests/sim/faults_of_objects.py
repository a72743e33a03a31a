"""Faults of objects that replicas share, planted one at a time: worlds of `tests.sim.objects` must fail with each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec
import pytest

from tenuto.base.errors import TenutoError
from tenuto.base.objects import ObjectEdit, ObjectItem, ObjectKey, StoredObject
from tenuto.serve.anthropic.batches import Batches, Run
from tenuto.serve.openai.conversations import PENDING, Conversation, Conversations
from tenuto.serve.shared.tenant_objects import TenantObjects
from tenuto.session.postgres.objects import Objects
from tests.sim.objects import Violation, simulate

Plant = Callable[[pytest.MonkeyPatch], None]


def changes_of_any_revision(patch: pytest.MonkeyPatch) -> None:
    real = Objects.edit

    def edit(objects: Objects, key: ObjectKey, asked: ObjectEdit, *, again: bool = False) -> bool:
        found = objects.find(key)
        if found is not None and asked.expected:
            asked = msgspec.structs.replace(asked, expected=found.revision)
        return real(objects, key, asked, again=again)

    patch.setattr(Objects, "edit", edit)


def workers_that_are_never_gone(patch: pytest.MonkeyPatch) -> None:
    find = Objects.find

    def found(objects: Objects, key: ObjectKey) -> StoredObject | None:
        there = find(objects, key)
        return msgspec.structs.replace(there, abandoned=False) if there is not None else None

    patch.setattr(Objects, "find", found)


def responses_that_are_given_up_although_they_were_committed(patch: pytest.MonkeyPatch) -> None:
    async def find(held: Conversations, name: str) -> Conversation:
        found = await held._find(name)
        if found.stored.abandoned:
            await held.free(name, found.head.response)
        return await held._find(name)

    patch.setattr(Conversations, "find", find)


def responses_without_their_input(patch: pytest.MonkeyPatch) -> None:
    items = TenantObjects.items

    async def listed(objects: TenantObjects, name: str, part: str) -> list[ObjectItem]:
        return [] if part == PENDING else await items(objects, name, part)

    patch.setattr(TenantObjects, "items", listed)


def batches_that_nobody_takes_over(patch: pytest.MonkeyPatch) -> None:
    async def claim(_: Batches, __: str) -> bool:
        return False

    patch.setattr(Batches, "_claim", claim)


def batches_that_a_replica_leaves_without_a_word(patch: pytest.MonkeyPatch) -> None:
    async def leave(_: Run) -> None:
        return None

    patch.setattr(Run, "_leave", leave)


FAULTS: Sequence[Plant] = (
    changes_of_any_revision,
    workers_that_are_never_gone,
    responses_that_are_given_up_although_they_were_committed,
    responses_without_their_input,
    batches_that_nobody_takes_over,
    batches_that_a_replica_leaves_without_a_word,
)
WORLDS = 6
"""The most worlds that are tried until one fails."""


def find(plant: Plant) -> int | None:
    """Returns the first world that fails with a fault."""
    for seed in range(WORLDS):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            try:
                simulate(seed)
            except (Violation, TenutoError):
                return seed
    return None


def main() -> None:
    logging.getLogger("tenuto").setLevel(logging.CRITICAL)
    for plant in FAULTS:
        print(plant.__name__, find(plant), flush=True)


if __name__ == "__main__":
    main()
