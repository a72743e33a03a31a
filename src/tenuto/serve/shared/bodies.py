"""JSON bodies: bounded in structure while they arrive, and parsed beside the event loop if they are large.

A parser holds Python's lock until it is done, even in a thread, so the cost of parsing has to be bounded first.
Text costs little, however long it is. Values cost more, and objects and lists most.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute

from tenuto.base.errors import TooLarge

T = TypeVar("T")

MAX_VALUES = 2**21
"""Values in a body: numbers, strings, lists, objects. The parser takes about 60 ms for so many numbers."""
MAX_PARTS = 2**18
"""Lists, objects and fields of objects in a body. The parser takes up to 60 ms for so many."""
MAX_DEPTH = 256
"""Lists and objects inside each other."""
LARGE = 2**16
"""Bytes from which on a body is parsed in a thread."""

_QUOTE = ord('"')
_OPENS, _CLOSES, _COMMA, _COLON = (np.isin(np.arange(256), list(letters)) for letters in (b"[{", b"]}", b",", b":"))
_MARKS = _OPENS | _CLOSES | _COMMA | _COLON
_MARKS[_QUOTE] = True
_STEPS = _OPENS.astype(np.int64) - _CLOSES.astype(np.int64)


class Structure:
    """Counts what a JSON body has outside its strings, while it arrives. If it is not JSON, the counts hold up to where
    a parser notices."""

    def __init__(self, most_values: int = MAX_VALUES) -> None:
        self._most_values = min(most_values, MAX_VALUES)
        self.values = 1
        self.parts = 0
        self._depth = 0
        self._quoted = False  # the next byte is inside a string
        self._escaped = False  # and follows a backslash

    def feed(self, piece: bytes) -> None:
        """Read on. Raises `TooLarge`."""
        if not piece:
            return
        if self._escaped:
            piece = b" " + piece[1:]
        self._escaped = (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1
        if self._quoted and b'"' not in piece:
            return
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"  ").replace(rb"\"", b"  ")
        letters = np.frombuffer(piece, np.uint8)
        marks = letters[_MARKS[letters]]
        quotes = marks == _QUOTE
        inside = np.logical_xor.accumulate(quotes) ^ self._quoted if len(marks) else quotes
        self._count(marks[~inside & ~quotes])
        self._quoted ^= bool(np.count_nonzero(quotes) % 2)

    def _count(self, marks: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        opened = int(np.count_nonzero(_OPENS[marks]))
        self.values += opened + int(np.count_nonzero(_COMMA[marks]))
        self.parts += opened + int(np.count_nonzero(_COLON[marks]))
        depths = self._depth + np.cumsum(_STEPS[marks])
        deepest = int(depths.max(initial=0))
        self._depth = int(depths[-1]) if len(depths) else self._depth
        if self.values > self._most_values:
            raise TooLarge(f"the body has more than {self._most_values} values, the most allowed")
        if self.parts > MAX_PARTS:
            raise TooLarge(f"the body has more than {MAX_PARTS} lists, objects and fields, the most allowed")
        if deepest > MAX_DEPTH:
            raise TooLarge(f"the body has lists and objects nested more than {MAX_DEPTH} deep, the most allowed")


def parsed(body: bytes) -> Any:
    """The value. Raises `ValueError` or `RecursionError`; what is said of malformed JSON is what `json` says."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # it is stricter, and faster
        return json.loads(body.decode("utf-8", "surrogatepass").removeprefix("\ufeff"))


_parser = ThreadPoolExecutor(1, "tenuto-json")
"""One thread: the event loop competes with it for Python's lock, and never with several."""


class JsonRequest(Request):
    """A request whose body is read into one piece of memory. It is dropped once it is parsed."""

    _digest: bytes | None = None

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            whole = bytearray()
            async for piece in self.stream():
                whole += piece
            self._body = bytes(whole)
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        if "idempotency-key" in self.headers:
            self._digest = await _worked(len(body), partial(_digest_of, self.url.path, body))
        value = await _worked(len(body), partial(parsed, body))
        self._body = b""
        return value

    async def digest(self) -> bytes:
        """Equal for requests whose paths and bodies are."""
        return self._digest if self._digest is not None else _digest_of(self.url.path, await self.body())


async def _worked(size: int, work: Callable[[], Any]) -> Any:
    """The result of `work` on `size` bytes."""
    return work() if size < LARGE else await in_parser(work)


async def in_parser(work: Callable[[], T]) -> T:
    """The result of `work`, from the thread that parses."""
    return await asyncio.get_running_loop().run_in_executor(_parser, work)


def _digest_of(path: str, body: bytes) -> bytes:
    digest = sha256(path.encode() + b"\n")
    digest.update(body)
    return digest.digest()


class JsonRoute(APIRoute):
    """A route that reads bodies as `JsonRequest` does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
