"""Sessions with their state, on their way through temporary files: none is ever whole in the edge's memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from tenuto.base.document import SessionDocument
from tenuto.base.errors import TenutoError, UnsupportedMediaType
from tenuto.base.state_file import StateFile
from tenuto.serve.native.schemas import SessionFile

MEDIA_TYPE = "application/octet-stream"
PIECE = 2**20
"""Bytes written or read at once."""
_BINARY: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
STATE_BODY: dict[str, Any] = {"requestBody": {"required": True, **_BINARY}}
STATE_ANSWER: dict[int | str, dict[str, Any]] = {200: {"description": "The file.", **_BINARY}}


@contextmanager
def spool() -> Iterator[Path]:
    """Where a temporary file may be written that only this user can read. It is removed at the end of the block."""
    with TemporaryDirectory(prefix="tenuto-") as directory:
        yield Path(directory) / "session"


@asynccontextmanager
async def spooled(request: Request) -> AsyncIterator[Path]:
    """The body of a request as a file, while the block runs. Raises `UnsupportedMediaType`."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != MEDIA_TYPE:
        raise UnsupportedMediaType(f"the body is declared as {given!r}; allowed: {MEDIA_TYPE}")
    with spool() as path:
        with path.open("wb") as file:
            waiting = bytearray()
            async for piece in request.stream():
                waiting += piece
                if len(waiting) >= PIECE:
                    await _written(file, waiting)
                    waiting = bytearray()
            await _written(file, waiting)
        yield path


async def _written(file: BinaryIO, data: bytearray) -> None:
    def write() -> None:
        file.write(data)
        file.flush()

    try:
        await asyncio.to_thread(write)
    except OSError as error:
        raise TenutoError(f"the server has no room for the file: {error.strerror}") from error


def document_of(path: Path) -> SessionDocument:
    """The session in a file, which keeps to what a session may be here. Raises `InvalidRequest`."""
    file = StateFile(path)
    file.close()
    document = file.document
    try:
        SessionFile.model_validate(msgspec.to_builtins(document))
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from None
    return document


def streamed(path: Path) -> Response:
    """An answer with the content of a file, which may be removed meanwhile."""
    file = path.open("rb")
    size = os.fstat(file.fileno()).st_size

    async def pieces() -> AsyncIterator[bytes]:
        with file:
            while piece := await asyncio.to_thread(file.read, PIECE):
                yield piece

    return StreamingResponse(pieces(), media_type=MEDIA_TYPE, headers={"content-length": str(size)})
