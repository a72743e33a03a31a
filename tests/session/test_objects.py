"""Objects: in the database of a fleet, and in memory, with the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar, cast

import psycopg
import pytest

from tenuto.base.errors import NotAcknowledged, ObjectDamaged
from tenuto.base.objects import ItemName, NewItem, ObjectEdit, ObjectKey
from tenuto.base.wire.fleet_messages import CountObjects, EditObject, FindObject, ListAbandoned, ListItems, ListObjects
from tenuto.base.wire.request import Request
from tenuto.runtime.shared_objects import OfObjects, SharedObjects
from tenuto.serve.shared.local_objects import LocalObjects
from tenuto.session.postgres.database import Database
from tenuto.session.postgres.objects import Objects
from tenuto.session.postgres.replicas import Replicas
from tests.postgres import database
from tests.present import present

T = TypeVar("T")

A = ObjectKey("t", "k", "a")


@pytest.fixture
def url() -> Iterator[str]:
    url = database()
    replicas = Replicas(Database(url), "tokens")
    replicas.join("http://one", 60)
    yield url
    replicas.db.close()


@pytest.fixture
def shared(url: str) -> Iterator[SharedObjects]:
    shared = SharedObjects(Objects(Database(url)))
    yield shared
    shared.close()


def created(revision: str = "1", *items: str, worker: int | None = None) -> ObjectEdit:
    added = [NewItem("p", name, name.encode()) for name in items]
    return ObjectEdit(expected="", revision=revision, head=b"head", worker=worker, added=added)


def test_an_object_in_memory_and_one_in_the_database_answer_alike(shared: SharedObjects) -> None:
    local, rng = LocalObjects(), Random(5)
    revisions = [""]
    for step in range(600):
        request = some_request(rng, step, revisions)
        if isinstance(request, EditObject):
            revisions.append(request.edit.revision)
        assert shared.carry_out(request) == asyncio.run(local.ask(cast("Request[Any]", request))), request


def some_request(rng: Random, step: int, revisions: list[str]) -> OfObjects:
    tenant, kind, name = rng.choice("tu"), rng.choice("kl"), rng.choice("ab")
    key, part, names = ObjectKey(tenant, kind, name), rng.choice("pq"), [f"item\0\\{n}" for n in range(4)]
    draw = rng.random()
    if draw < 0.1:
        return FindObject(key=key)
    if draw < 0.2:
        return ListObjects(tenant=tenant, kind=kind, most=rng.choice((None, 1)))
    if draw < 0.3:
        return CountObjects(tenant=tenant, kind=kind)
    if draw < 0.5:
        after = rng.choice((None, *names))
        return ListItems(key=key, part=part, most=rng.choice((1, 9)), after=after, newest_first=rng.random() < 0.5)
    edit = ObjectEdit(
        expected=rng.choice([*revisions[-6:], ""]),
        revision=f"r{step}",
        head=None if rng.random() < 0.1 else b"h" * rng.randrange(9),
        emptied=[part] if rng.random() < 0.2 else [],
        removed=[ItemName(part, each) for each in names],
        added=[NewItem(part, each, b"b" * rng.randrange(9)) for each in rng.sample(names, 2)],
    )
    return EditObject(key=key, edit=edit)


def test_of_two_changes_that_have_seen_the_same_one_is_carried_out(shared: SharedObjects) -> None:
    edit(shared, created("1"))
    first = ObjectEdit(expected="1", revision="2", head=b"first")
    second = ObjectEdit(expected="1", revision="3", head=b"second", added=[NewItem("p", "i", b"")])
    assert edit(shared, first)
    assert not edit(shared, second)
    found = present(shared.carry_out(FindObject(key=A)))
    assert (found.head, found.revision, found.size) == (b"first", "2", 5)
    assert not edit(shared, created("4"))


def edit(shared: SharedObjects, asked: ObjectEdit) -> bool:
    done: bool = shared.carry_out(EditObject(key=A, edit=asked))
    return done


@pytest.mark.parametrize("kind", ["create", "change", "delete"])
def test_a_change_whose_commit_was_not_confirmed_is_carried_out_once(
    shared: SharedObjects, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind != "create":
        edit(shared, created("1", "a"))
    asked = {
        "create": created("2", "a"),
        "change": ObjectEdit(expected="1", revision="2", head=b"head", added=[NewItem("p", "b", b"b")]),
        "delete": ObjectEdit(expected="1", revision="2", head=None),
    }[kind]
    with unconfirmed(monkeypatch, 1):
        assert edit(shared, asked)
    page = shared.carry_out(ListItems(key=A, part="p", most=9))
    names = {"create": ["a"], "change": ["a", "b"], "delete": None}[kind]
    assert (None if page is None else [item.name for item in page.items]) == names


def test_an_answer_that_never_comes_is_no_answer(shared: SharedObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = created("1", "a")
    with unconfirmed(monkeypatch, 9), pytest.raises(NotAcknowledged, match="cannot be asked"):
        edit(shared, asked)
    assert edit(shared, asked)
    assert present(shared.carry_out(FindObject(key=A))).size == 5


@contextmanager
def unconfirmed(monkeypatch: pytest.MonkeyPatch, most: int) -> Iterator[None]:
    """Lets the answers to so many transactions be lost, after they are committed."""
    transaction: Callable[[Database], Any] = Database.transaction
    left = most

    @contextmanager
    def lossy(db: Database) -> Iterator[None]:
        nonlocal left
        with transaction(db):
            yield
        if left:
            left -= 1
            raise psycopg.OperationalError("the confirmation is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "transaction", lossy)
        yield


def test_objects_whose_worker_is_gone_are_abandoned(url: str, shared: SharedObjects) -> None:
    mine = Replicas(Database(url), "tokens")
    mine.join("http://two", 60)
    edit(shared, created("1", worker=mine.number))
    assert not present(shared.carry_out(FindObject(key=A))).abandoned
    assert shared.carry_out(ListAbandoned(kind="k")) == []
    mine.end()
    assert present(shared.carry_out(FindObject(key=A))).abandoned
    assert shared.carry_out(ListAbandoned(kind="k")) == [A]
    assert shared.carry_out(ListAbandoned(kind="l")) == []
    edit(shared, ObjectEdit(expected="1", revision="2", head=b"head"))
    assert shared.carry_out(ListAbandoned(kind="k")) == []
    mine.db.close()


@pytest.mark.parametrize("damage", ["objects SET head = 'x'", "objects SET size = 1", "items SET body = 'x'"])
def test_a_damaged_object_is_not_served(url: str, shared: SharedObjects, damage: str) -> None:
    edit(shared, created("1", "a"))
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(f"UPDATE {damage}".encode())
    asked = ListItems(key=A, part="p", most=1) if damage.startswith("items") else FindObject(key=A)
    with pytest.raises(ObjectDamaged, match="is damaged"):
        shared.carry_out(asked)
