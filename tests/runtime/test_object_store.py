"""Object stores: what is written is there, what fails is said without secrets, and what cannot be used is refused."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore, MemoryStore

from tenuto.base.config import allows_http
from tenuto.base.errors import ConfigError, ExtraMissing
from tenuto.runtime.object_store import PIECE, ObjectMissing, ObjectStore, StoreFailed, open_store, said


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    (tmp_path / "store").mkdir()
    return ObjectStore(MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "store"))


def test_files_of_any_size_are_copied_and_come_back(store: ObjectStore, tmp_path: Path) -> None:
    sizes = (0, 1, PIECE, 2 * PIECE + 3)
    for size in sizes:
        path = tmp_path / "file"
        path.write_bytes(bytes(number % 251 for number in range(1000)) * (size // 1000 + 1))
        with path.open("r+b") as file:
            file.truncate(size)
        assert store.put_file("folder/object", path) == size
        store.get_file("folder/object", size, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == path.read_bytes()
        assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o600
        (tmp_path / "copy").unlink()
    assert store.moved == {"uploaded": sum(sizes), "downloaded": sum(sizes)}
    with pytest.raises(FileNotFoundError):
        store.put_file("folder/object", tmp_path / "missing")


def test_an_object_that_is_missing_truncated_or_too_large_is_an_error(store: ObjectStore, tmp_path: Path) -> None:
    store.put("folder/object", b"12345")
    assert store.get("folder/object", 5) == b"12345"
    with pytest.raises(ObjectMissing):
        store.get("folder/another", 5)
    assert not store.failures.total()
    with pytest.raises(StoreFailed, match="more than 4"):
        store.get("folder/object", 4)
    with pytest.raises(StoreFailed):
        store.get_file("folder/object", 6, tmp_path / "copy")
    assert store.failures == {"read": 2}


def test_objects_are_listed_by_folder_and_removed_also_if_some_are_missing(store: ObjectStore) -> None:
    for number in range(250):
        store.put(f"one/{number}", b"")
    store.put("two/x", b"")
    assert store.names("one") == {str(number) for number in range(250)}
    assert store.names("none") == set()
    assert sorted(store.folders()) == ["one", "two"]
    store.remove([f"one/{number}" for number in range(-3, 249)])
    assert store.names("one") == {"249"}


def test_a_directory_is_created_for_its_owner_alone(tmp_path: Path) -> None:
    store = open_store((tmp_path / "with space" / "store").as_uri())
    assert stat.S_IMODE((tmp_path / "with space" / "store").stat().st_mode) == 0o700
    assert store.folders() == []  # nothing is left of the attempt


def test_a_store_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"shared_tier is 'file://.*/file', which cannot be used: .*; allowed: a"):
        open_store((tmp_path / "file").as_uri())
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hidden-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-key")
    with pytest.raises(
        ConfigError, match=r"'s3://bucket/p', which cannot be used: an object could not be writ"
    ) as seen:
        open_store("s3://bucket/p")
    assert "hidden" not in str(seen.value)
    with pytest.raises(ConfigError, match="allowed: s3://BUCKET/PREFIX"):
        open_store("memory:///")


def test_without_the_extra_a_shared_tier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ExtraMissing, match=r"install tenuto\[objectstore\]"):
        open_store("s3://bucket")


def test_what_a_store_says_is_shown_without_signatures() -> None:
    error: Any = ValueError("Error performing PUT https://a/b?sig=hidden&x=1 in 5ms\n\nDebug source:\nhidden")
    assert said(error) == "Error performing PUT https://a/b?... in 5ms"


@pytest.mark.parametrize(("text", "allowed"), [("true", True), ("1", True), ("false", False), ("", False)])
def test_the_usual_variable_allows_a_store_without_tls(text: str, allowed: bool) -> None:
    assert allows_http({"AWS_ALLOW_HTTP": text}) == allowed
