"""Objects in a bucket of S3, of Google Cloud Storage or of Azure, or in a directory, by the library `obstore`."""

from __future__ import annotations

import re
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tenuto.base.config import allows_http, shared_tier_url
from tenuto.base.errors import ConfigError, ExtraMissing
from tenuto.base.private import make_private_directory, open_private

PIECE = 2**23
"""The most bytes of an object that are read at once."""
PART = 5 * 2**20
"""The size in bytes of the parts in which a large file is written: the smallest that S3 allows."""
PARTS = 2
"""The number of parts of a file that are written at once."""
CONNECT_SECONDS = 2
REQUEST_SECONDS = 20
"""The most time for one request, which reads or writes `PIECE` bytes at most."""
REMOVED = 100
"""The most objects that one request removes."""
RETRIES = 2
RETRY_SECONDS = 5
_SAID = 400
"""The most characters of a store's error message that are reported."""
_PROBE = b"whether this can be written and read"


class StoreFailed(Exception):
    """Raised if a store cannot be asked, or has refused. The message has no credentials."""


class ObjectMissing(StoreFailed):
    """Raised if the object does not exist."""


class ObjectStore:
    """Objects by name. Several threads may use it at once. All methods raise `StoreFailed`.

    `moved`: total number of bytes written ("uploaded") and read ("downloaded"); `failures`: requests that failed, by
    what they were to do.
    """

    def __init__(self, store: Any) -> None:
        """`store`: one of `obstore.store`."""
        import obstore  # noqa: PLC0415 - an extra

        self._store = store
        self._all: Any = obstore
        self._errors = obstore.exceptions.BaseError, OSError, ValueError
        self._counting = threading.Lock()
        self.moved: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    @contextmanager
    def _to(self, operation: str) -> Iterator[None]:
        """Raises the store's errors in the block as `StoreFailed`, and counts them."""
        try:
            yield
        except self._errors as error:
            missing = isinstance(error, FileNotFoundError)
            with self._counting:
                self.failures[operation] += not (missing and operation == "read")
            raise (ObjectMissing if missing else StoreFailed)(said(error)) from None

    def _count(self, direction: str, size: int) -> None:
        with self._counting:
            self.moved[direction] += size

    def put(self, name: str, data: bytes) -> None:
        """Writes an object, whole or not at all."""
        with self._to("write"):
            self._all.put(self._store, name, data)
        self._count("uploaded", len(data))

    def put_file(self, name: str, path: Path) -> int:
        """Writes a file as an object, whole or not at all, and returns its size. Raises `FileNotFoundError` if the file
        does not exist."""
        with path.open("rb") as file:
            size = path.stat().st_size
            with self._to("write"):
                self._all.put(self._store, name, file, chunk_size=PART, max_concurrency=PARTS)
        self._count("uploaded", size)
        return size

    def get(self, name: str, most: int) -> bytes:
        """Returns an object, which must not have more than `most` bytes."""
        with self._to("read"):
            found = self._all.get(self._store, name)
            if found.meta["size"] > most:
                raise ValueError(f"{name} has {found.meta['size']} bytes, which are more than {most}")
            data = bytes(found.bytes())
        self._count("downloaded", len(data))
        return data

    def get_file(self, name: str, size: int, path: Path) -> None:
        """Writes an object of `size` bytes to a new file, piece by piece."""
        with self._to("read"), open_private(path) as file:
            for start in range(0, size, PIECE):
                end = min(start + PIECE, size)
                piece = self._all.get_range(self._store, name, start=start, end=end)
                if len(piece) < end - start:
                    raise ValueError(f"{name} has fewer than {size} bytes")
                file.write(piece)
        self._count("downloaded", size)

    def remove(self, names: Collection[str]) -> None:
        """Removes those of these objects that exist."""
        with self._to("remove"):
            for some in _batches(names):
                try:
                    self._all.delete(self._store, some)
                except FileNotFoundError:  # some stores report a missing one, and may leave the others
                    self._remove_each(some)

    def _remove_each(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._all.delete(self._store, name)

    def names(self, folder: str) -> set[str]:
        """Returns the names of all objects in a folder, without the folder's name."""
        with self._to("list"):
            listed = [each["path"] for some in self._all.list(self._store, folder) for each in some]
        return {path.removeprefix(f"{folder}/") for path in listed}

    def folders(self) -> list[str]:
        """Returns the names of the folders that have objects."""
        with self._to("list"):
            return list(self._all.list_with_delimiter(self._store)["common_prefixes"])

    def try_out(self) -> None:
        """Writes an object, reads, lists and removes it."""
        folder = f"try-{secrets.token_hex(8)}"
        for done, step in (
            ("written", lambda: self.put(f"{folder}/object", _PROBE)),
            ("read", lambda: self.get(f"{folder}/object", len(_PROBE))),
            ("listed", lambda: self.names(folder)),
            ("removed", lambda: self.remove([f"{folder}/object"])),
        ):
            try:
                step()
            except StoreFailed as error:
                raise StoreFailed(f"an object could not be {done}: {error}") from None


def open_store(url: str) -> ObjectStore:
    """Opens the store at a URL, and makes sure that objects can be written, read, listed and removed there. Raises
    `ExtraMissing` or `ConfigError`."""
    url = shared_tier_url("shared_tier", url) or ""
    try:
        from obstore.exceptions import BaseError  # noqa: PLC0415 - an extra
        from obstore.store import LocalStore, from_url  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ExtraMissing("a shared tier needs obstore; install tenuto[objectstore]") from error
    try:
        if url.startswith("file:"):
            directory = Path(unquote(urlsplit(url).path))
            make_private_directory(directory)
            store: Any = LocalStore(directory, automatic_cleanup=True)
        else:
            seconds = {"connect_timeout": f"{CONNECT_SECONDS}s", "timeout": f"{REQUEST_SECONDS}s"}
            store = from_url(
                url,
                client_options={**seconds, "allow_http": allows_http()},
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
            )
        found = ObjectStore(store)
        found.try_out()
    except (BaseError, OSError, ValueError, StoreFailed) as error:
        raise ConfigError(
            f"shared_tier is {url!r}, which cannot be used: {said(error)}; allowed: a bucket or directory in which "
            "this process may write, read, list and remove objects, with credentials from the environment"
        ) from None
    return found


def said(error: Exception) -> str:
    """Returns a store's error message, in one line and without the queries of URLs, which may contain signatures."""
    text = " ".join(str(error).partition("Debug source")[0].split())
    return re.sub(r"(://[^\s?]*)\?[^\s\"')]+", r"\1?...", text)[:_SAID] or type(error).__name__


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while some := list(islice(rest, REMOVED)):
        yield some
