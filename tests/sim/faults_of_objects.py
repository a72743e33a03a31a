"""Faults of objects that replicas share, planted one at a time: worlds of `tests.sim.objects` must fail with each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from tenuto.base.objects import NewItem, ObjectEdit, ObjectItem, ObjectKey, StoredObject
from tenuto.serve.anthropic.batches import Batches, Run
from tenuto.serve.openai.conversations import ITEMS, PENDING, Conversation, Conversations, Head
from tenuto.serve.shared.tenant_objects import Edit, TenantObjects
from tenuto.session.postgres.objects import Objects
from tests.sim.objects import simulate

Plant = Callable[[pytest.MonkeyPatch], None]


def changes_of_any_revision(patch: pytest.MonkeyPatch) -> None:
    real = Objects.edit

    def edit(objects: Objects, key: ObjectKey, asked: ObjectEdit, *, again: bool = False) -> bool:
        found = objects.find(key)
        if found is not None and asked.expected:
            asked = msgspec.structs.replace(asked, expected=found.revision)
        return real(objects, key, asked, again=again)

    patch.setattr(Objects, "edit", edit)


def changes_that_forget_what_they_have_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Objects, "_remove", lambda *_: 0)


def workers_that_are_never_gone(patch: pytest.MonkeyPatch) -> None:
    find = Objects.find

    def found(objects: Objects, key: ObjectKey) -> StoredObject | None:
        there = find(objects, key)
        return msgspec.structs.replace(there, abandoned=False) if there is not None else None

    patch.setattr(Objects, "find", found)


def responses_that_are_added_after_others_were(patch: pytest.MonkeyPatch) -> None:
    async def complete(held: Conversations, name: str, _: str, output: Sequence[dict[str, Any]]) -> None:
        given = await held._items(name, PENDING)

        def completed(found: StoredObject | None) -> Edit | None:
            if found is None:
                return None
            head = msgspec.structs.replace(Conversation.of(found).head, response="")
            return Edit(msgspec.msgpack.encode(head), None, (PENDING,), added=_new([*given, *output]))

        await held._objects.change(name, completed)

    patch.setattr(Conversations, "complete", complete)


def _new(items: Sequence[dict[str, Any]]) -> list[NewItem]:
    return [NewItem(ITEMS, each["id"], msgspec.json.encode(each)) for each in items]


def responses_that_are_given_up_although_they_were_committed(patch: pytest.MonkeyPatch) -> None:
    async def find(held: Conversations, name: str) -> Conversation:
        found = await held._find(name)
        if found.stored.abandoned:
            await held.free(name, found.head.response)
        return await held._find(name)

    patch.setattr(Conversations, "find", find)


def conversations_that_any_response_frees(patch: pytest.MonkeyPatch) -> None:
    async def free(held: Conversations, name: str, _: str) -> None:
        def freed(found: StoredObject | None) -> Edit | None:
            if found is None:
                return None
            head: Head = msgspec.structs.replace(Conversation.of(found).head, response="")
            return Edit(msgspec.msgpack.encode(head), None, (PENDING,))

        await held._objects.change(name, freed)

    patch.setattr(Conversations, "free", free)


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


def batches_with_two_runs_at_a_replica(patch: pytest.MonkeyPatch) -> None:
    async def resume(held: Batches, name: str, answer_to: Any, at_once: int) -> None:
        if await held._claim(name):
            with held._working_on(name) as free:
                if free:
                    await held._run(name, answer_to, at_once)

    patch.setattr(Batches, "resume", resume)


FAULTS: dict[Plant, int] = {
    changes_of_any_revision: 0,
    changes_that_forget_what_they_have_removed: 0,
    workers_that_are_never_gone: 0,
    responses_that_are_added_after_others_were: 7,
    responses_that_are_given_up_although_they_were_committed: 0,
    conversations_that_any_response_frees: 0,
    responses_without_their_input: 0,
    batches_that_nobody_takes_over: 0,
    batches_that_a_replica_leaves_without_a_word: 0,
    batches_with_two_runs_at_a_replica: 0,
}
"""The faults, each with a world that fails with it. `python -m tests.sim.faults_of_objects` looks for such worlds."""


def find(plant: Plant, most: int) -> int | None:
    """Returns the first world that fails with a fault."""
    for seed in range(most):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            try:
                simulate(seed)
            except Exception:  # noqa: BLE001 - whatever a fault causes
                return seed
    return None


def main() -> None:
    logging.getLogger("tenuto").setLevel(logging.CRITICAL)
    for plant in FAULTS:
        print(plant.__name__, find(plant, 25), flush=True)


if __name__ == "__main__":
    main()
