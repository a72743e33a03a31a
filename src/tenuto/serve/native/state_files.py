"""Export and import of sessions with their state, through temporary files: the edge never has a whole state in
memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from tenuto.base.errors import NoRoom, UnsupportedMediaType
from tenuto.base.wire.document import SessionDocument
from tenuto.base.wire.state_file import StateFile
from tenuto.serve.native.schemas import SessionFile
from tenuto.serve.shared.bodies import LARGE, Structure

MEDIA_TYPE = "application/octet-stream"
PIECE = 2**20
"""Bytes written or read at once."""
VALUES_A_TOKEN = 16
"""Upper bound on the JSON values that represent a turn of one token."""
_BINARY: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
STATE_BODY: dict[str, Any] = {"requestBody": {"required": True, **_BINARY}}
STATE_ANSWER: dict[int | str, dict[str, Any]] = {200: {"description": "The file.", **_BINARY}}


@contextmanager
def spool() -> Iterator[Path]:
    """Yields a path for a temporary file that only this user can read. The file is removed at the end of the block.
    Raises `NoRoom`."""
    try:
        made = TemporaryDirectory(prefix="tenuto-")
    except OSError as error:
        raise _no_room(error) from error
    with made as directory:
        yield Path(directory) / "session"


@asynccontextmanager
async def spooled(request: Request) -> AsyncIterator[Path]:
    """Yields the path of a file with a request's body, which exists while the block runs. Raises `UnsupportedMediaType`
    or `NoRoom`."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != MEDIA_TYPE:
        raise UnsupportedMediaType(f"the body is declared as {given!r}; allowed: {MEDIA_TYPE}")
    with spool() as path:
        with _created(path) as file:
            waiting = bytearray()
            async for piece in request.stream():
                waiting += piece
                if len(waiting) >= PIECE:
                    await _written(file, waiting)
                    waiting = bytearray()
            await _written(file, waiting)
        yield path


def _created(path: Path) -> FileIO:
    """Creates a file without a buffer: a buffer that cannot be written would raise again when the file is closed."""
    try:
        return FileIO(path, "x")
    except OSError as error:
        raise _no_room(error) from error


async def _written(file: FileIO, data: bytearray) -> None:
    def write() -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    try:
        await asyncio.to_thread(write)
    except OSError as error:
        raise _no_room(error) from error


def _no_room(error: OSError) -> NoRoom:
    return NoRoom(f"the server has no room for the file: {error.strerror}")


def document_of(path: Path, context_length: int) -> SessionDocument:
    """Returns the session in a file after validating it. A file with far more values than a session of `context_length`
    tokens is not parsed. Raises `InvalidRequest` or `TooLarge`."""

    def inspect(text: bytes) -> None:
        structure = Structure(VALUES_A_TOKEN * context_length + LARGE)
        for begin in range(0, len(text), PIECE):
            structure.feed(text[begin : begin + PIECE])

    file = StateFile(path, inspect)
    file.close()
    document = file.document
    try:
        SessionFile.model_validate(msgspec.to_builtins(document))
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from None
    return document


def streamed(path: Path) -> Response:
    """Returns an answer with the content of a file. The file may be removed while the answer is sent."""
    file = path.open("rb")
    size = os.fstat(file.fileno()).st_size

    async def pieces() -> AsyncIterator[bytes]:
        with file:
            while piece := await asyncio.to_thread(file.read, PIECE):
                yield piece

    return StreamingResponse(pieces(), media_type=MEDIA_TYPE, headers={"content-length": str(size)})
