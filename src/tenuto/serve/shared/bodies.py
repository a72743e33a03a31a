"""JSON bodies: bounded in structure while they arrive, and parsed beside the event loop if they are large.

A parser holds Python's lock until it is done, even in a thread, so the cost of parsing has to be bounded first.
Text costs little, however long it is. Values cost more, and objects and lists most.
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
from fastapi._compat import ModelField
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope

from tenuto.base.errors import TooLarge
from tenuto.serve.shared.json_pieces import PIECE, Cut, Cuts, Unfit, parsed_in_pieces

T = TypeVar("T")

MAX_VALUES = 2**21
"""Values in a body: numbers, strings, lists, objects. The parser takes about 60 ms for so many numbers."""
MAX_PARTS = 2**18
"""Lists, objects and fields of objects in a body. The parser takes up to 60 ms for so many."""
MAX_DEPTH = 256
"""Lists and objects inside each other."""
LARGE = 2**16
"""Bytes from which on a body is parsed and checked in a thread."""
MANY = 64
"""Messages or prompts of one request from which on they are translated in a thread."""
CUTS = "tenuto.cuts"
"""In a request's scope: the places at which its body may be cut, complete once it has arrived."""

_QUOTE = ord('"')
_OPENS, _CLOSES, _COMMA, _COLON = (np.isin(np.arange(256), list(letters)) for letters in (b"[{", b"]}", b",", b":"))
_MARKS = _OPENS | _CLOSES | _COMMA | _COLON
_MARKS[_QUOTE] = True
_STEPS = _OPENS.astype(np.int64) - _CLOSES.astype(np.int64)


class Structure:
    """Counts what a JSON body has outside its strings, while it arrives. If it is not JSON, the counts hold up to where
    a parser notices."""

    def __init__(self, most_values: int = MAX_VALUES, piece_bytes: int = PIECE) -> None:
        self._most_values = min(most_values, MAX_VALUES)
        self.values = 1
        self.parts = 0
        self._depth = 0
        self._quoted = False  # the next byte is inside a string
        self._escaped = False  # and follows a backslash
        self._size = 0  # bytes so far
        self._cuts = Cuts(piece_bytes)
        self._first: tuple[Any, ...] | None = None  # what `_cuts` is still to read of the first piece

    @property
    def cuts(self) -> list[Cut]:
        """Places at which the body may be cut."""
        return self._cuts.found

    def feed(self, piece: bytes) -> None:
        """Read on. Raises `TooLarge`."""
        if not piece:
            return
        if self._escaped:
            piece = b" " + piece[1:]
        self._escaped = (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1
        begin, self._size = self._size, self._size + len(piece)
        if self._first is not None:
            self._cuts.feed(*self._first)
            self._first = None
        if self._quoted and b'"' not in piece:
            self._cuts.inside(self._size)
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
        if self._quoted and not quotes.any():  # but escaped ones
            self._cuts.inside(self._size)
            return
        self._quoted ^= bool(np.count_nonzero(quotes) % 2)
        quote = begin + int(places[quotes][-1]) if self._quoted else None
        found = marks[outside], places[outside] + begin, quote
        if begin:
            self._cuts.feed(*found)
        else:
            self._first = found  # most bodies have one piece, which is not cut

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


def _value(pieces: list[bytes], cuts: Sequence[Cut]) -> Any:
    """The value of a body, which is taken out of `pieces`. Raises as `parsed`."""
    body = b"".join(pieces)  # which holds no lock, if it is large
    pieces.clear()
    if cuts:
        with suppress(Unfit, ValueError, RecursionError):  # it is parsed as a whole, which says what is wrong
            return parsed_in_pieces(body, cuts)
    return parsed(body)


class JsonRequest(Request):
    """A request whose body is dropped once it is parsed. A large one is parsed and checked beside the event loop."""

    def __init__(self, scope: Scope, receive: Receive, field: ModelField | None = None) -> None:
        """`field`: what the body as a whole has to be."""
        super().__init__(scope, receive)
        self.refusal: Exception | None = None  # of a large body that is JSON, but not what it has to be
        self._field = field
        self._pieces: list[bytes] | None = None
        self._digest: bytes | None = None

    async def body(self) -> bytes:
        """The beginning of the body. FastAPI keeps it as long as the request, but only asks whether there is one."""
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
        value = _value(pieces, self.scope.get(CUTS, ()))
        if self._field is None or not checks:
            return value
        try:
            model, errors = self._field.validate(value, loc=("body",))
        except Exception as error:  # noqa: BLE001 - an `InvalidRequest`: to FastAPI, whatever is raised here means that it is not JSON
            self.refusal = error
        else:
            if not errors:
                return model  # which is valid when it is checked again
            self.refusal = RequestValidationError(errors, body=value)
        raise HTTPException(400)

    async def digest(self) -> bytes:
        """Equal for requests whose paths and bodies are."""
        if self._digest is None:
            await self.body()
            self._digest = _digest_of(self.url.path, self._pieces or [])
        return self._digest


async def of_many(count: int, work: Callable[[], T]) -> T:
    """The result of `work` on `count` messages or prompts."""
    return work() if count < MANY else await in_parser(work)


async def in_parser(work: Callable[[], T]) -> T:
    """The result of `work`, from the thread that parses."""
    return await asyncio.get_running_loop().run_in_executor(_parser, copy_context().run, work)


def _digest_of(path: str, pieces: Iterable[bytes]) -> bytes:
    digest = sha256(path.encode() + b"\n")
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


class JsonRoute(APIRoute):
    """A route that reads bodies as `JsonRequest` does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        whole = len(self.dependant.body_params) == 1 and not self._embed_body_fields
        field = self.dependant.body_params[0] if whole else None

        async def handle_json(request: Request) -> Response:
            reading = JsonRequest(request.scope, request.receive, field)
            try:
                return await handle(reading)
            except HTTPException:
                if reading.refusal is None:
                    raise
            raise reading.refusal

        return handle_json
