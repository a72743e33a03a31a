"""JSON bodies: their structure is bounded while they arrive, and large ones are parsed in a thread.

A parser holds Python's lock until it is done, even in a thread, so the cost of parsing has to be bounded first. Text
costs little at any length; values cost more, and objects and lists most.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi import Request, Response
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope

from tenuto.base.errors import TooLarge
from tenuto.serve.shared.long_texts import LONG, Unfit, parsed_beside

T = TypeVar("T")

MAX_VALUES = 2**21
"""Maximum number of values in a body: numbers, strings, lists, objects. This many numbers take about 60 ms to parse."""
MAX_PARTS = 2**18
"""Maximum number of lists, objects and fields in a body. This many take up to 60 ms to parse."""
MAX_DEPTH = 256
"""Maximum nesting of lists and objects."""
LARGE = 2**16
"""Smallest size, in bytes, of a body that is parsed and checked in a thread."""
MANY = 64
"""Smallest number of messages or prompts in a request that are translated in a thread."""
TEXTS = "tenuto.texts"
"""Key in a request's scope of the places of long texts in its body. They are complete once the body has arrived."""

_QUOTE = ord('"')
_OPENS, _CLOSES, _COMMA, _COLON = (np.isin(np.arange(256), list(letters)) for letters in (b"[{", b"]}", b",", b":"))
_MARKS = _OPENS | _CLOSES | _COMMA | _COLON
_MARKS[_QUOTE] = True
_STEPS = _OPENS.astype(np.int64) - _CLOSES.astype(np.int64)


class Structure:
    """Counts the values and nesting of a JSON body while it arrives. If the body is not JSON, the counts are right up
    to the place where a parser stops. `texts`: where the texts of more than `long` bytes begin and end, without their
    quotes."""

    def __init__(self, most_values: int = MAX_VALUES, long: int = LONG) -> None:
        self._most_values = min(most_values, MAX_VALUES)
        self.values = 1
        self.parts = 0
        self.texts: list[tuple[int, int]] = []
        self._long = long
        self._depth = 0
        self._quoted = False  # the next byte is inside a string,
        self._escaped = False  # and after a backslash
        self._size = 0  # bytes so far
        self._quote = 0  # place of the quote before the text in which the body ends so far, if it ends in one

    def feed(self, piece: bytes) -> None:
        """Reads the next piece of the body. Raises `TooLarge`."""
        if not piece:
            return
        if self._escaped:
            piece = b" " + piece[1:]
        self._escaped = (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1
        begin, self._size = self._size, self._size + len(piece)
        if self._quoted and b'"' not in piece:
            return
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"  ").replace(rb"\"", b"  ")
        letters = np.frombuffer(piece, np.uint8)
        places = np.flatnonzero(_MARKS[letters])
        marks = letters[places]
        quotes = marks == _QUOTE
        inside = np.logical_xor.accumulate(quotes) ^ self._quoted if len(marks) else quotes
        outside = ~inside & ~quotes
        self._count(marks[outside])
        self._follow(places[quotes] + begin)

    def _follow(self, quotes: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Notes long texts, given the places of further quotes."""
        if self._quoted:
            quotes = np.concatenate(([self._quote], quotes))
        pairs = quotes[: len(quotes) // 2 * 2].reshape(-1, 2)
        long = pairs[pairs[:, 1] - pairs[:, 0] - 1 > self._long]
        self.texts += [(begin + 1, end) for begin, end in long.tolist()]
        self._quoted = len(quotes) % 2 == 1
        if self._quoted:
            self._quote = int(quotes[-1])

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
    """Parses a body. Raises `ValueError` or `RecursionError`; messages about malformed JSON are those of `json`."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # msgspec is faster, but stricter
        return json.loads(body.decode("utf-8", "surrogatepass").removeprefix("\ufeff"))


_parser = ThreadPoolExecutor(1, "tenuto-json")
"""A single thread, so that the event loop never competes with several for Python's lock."""


def _value(pieces: list[bytes], texts: Sequence[tuple[int, int]]) -> Any:
    """Parses the body in `pieces`, which is emptied, with long texts at `texts`. Raises the same errors as `parsed`."""
    body = b"".join(pieces)  # releases the lock if the body is large
    pieces.clear()
    if texts:
        with suppress(Unfit, ValueError, RecursionError):  # then parsed as a whole, for the error message
            return parsed_beside(body, texts)
    return parsed(body)


Check = Callable[[Any], tuple[Any, Sequence[Any]]]
"""Validates a whole body. Returns the model, and Pydantic's errors."""


class JsonRequest(Request):
    """A request that drops its body once it is parsed. A large body is parsed and checked in a thread."""

    def __init__(self, scope: Scope, receive: Receive, check: Check | None = None) -> None:
        super().__init__(scope, receive)
        self.refusal: Exception | None = None  # of a large body that is JSON, but invalid
        self._check = check
        self._pieces: list[bytes] | None = None
        self._digest: bytes | None = None

    async def body(self) -> bytes:
        """Returns only the body's first byte: FastAPI keeps the result as long as the request, but only checks whether
        it is empty."""
        if self._pieces is None:
            self._pieces = [piece async for piece in self.stream() if piece]
        return self._pieces[0][:1] if self._pieces else b""

    async def json(self) -> Any:
        await self.body()
        pieces = self._pieces or []
        read = partial(self._read, pieces, keyed="idempotency-key" in self.headers)
        return read() if sum(map(len, pieces)) < LARGE else await in_parser(partial(read, checks=True))

    def _read(self, pieces: list[bytes], *, keyed: bool, checks: bool = False) -> Any:
        if keyed:
            self._digest = _digest_of(self.url.path, pieces)
        value = _value(pieces, self.scope.get(TEXTS, ()) if checks else ())
        if self._check is None or not checks:
            return value
        try:
            model, errors = self._check(value)
        except Exception as error:  # noqa: BLE001 - FastAPI would take it for malformed JSON
            self.refusal = error
        else:
            if not errors:
                return model  # passes when it is checked again
            self.refusal = RequestValidationError(errors, body=value)
        raise HTTPException(400)

    async def digest(self) -> bytes:
        """Returns a digest of the request's path and body."""
        if self._digest is None:
            await self.body()
            self._digest = _digest_of(self.url.path, self._pieces or [])
        return self._digest


async def of_many(count: int, work: Callable[[], T]) -> T:
    """Returns the result of `work` on `count` messages or prompts, run in the parser's thread if there are many."""
    return work() if count < MANY else await in_parser(work)


async def in_parser(work: Callable[[], T]) -> T:
    """Returns the result of `work`, run in the parser's thread."""
    return await asyncio.get_running_loop().run_in_executor(_parser, copy_context().run, work)


def _digest_of(path: str, pieces: Iterable[bytes]) -> bytes:
    digest = sha256(path.encode() + b"\n")
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


class JsonRoute(APIRoute):
    """A route whose requests are `JsonRequest`s."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        whole = len(self.dependant.body_params) == 1 and not self._embed_body_fields
        check = partial(self.dependant.body_params[0].validate, loc=("body",)) if whole else None

        async def handle_json(request: Request) -> Response:
            reading = JsonRequest(request.scope, request.receive, check)
            try:
                return await handle(reading)
            except HTTPException:
                if reading.refusal is None:
                    raise
            raise reading.refusal

        return handle_json
