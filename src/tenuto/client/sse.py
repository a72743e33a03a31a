"""Server-sent events, as they arrive in pieces (HTML standard, section 9.2.6)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event. `name` is "message" if it has none; `id` is the last that the stream has named."""

    name: str
    data: str
    id: str


class EventParser:
    """Takes a stream in pieces, cut anywhere, and gives its events. One that is cut off is not given."""

    def __init__(self) -> None:
        self._rest = b""  # of the last line, which has not ended
        self._after_cr = False  # a newline that comes now belongs to the line end before
        self._begun = False
        self._name = ""
        self._data: list[str] = []
        self._id = ""

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """Events that are complete with `piece`."""
        if not piece:
            return []
        if self._after_cr:
            piece = piece.removeprefix(b"\n")
        self._after_cr = piece.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> ServerEvent | None:
        if not self._begun:
            line, self._begun = line.removeprefix(_BOM), True
        if not line:
            return self._dispatch()
        field, _, value = line.decode(errors="replace").partition(":")
        value = value.removeprefix(" ")
        match field:  # a comment has an empty one
            case "event":
                self._name = value
            case "data":
                self._data.append(value)
            case "id" if "\0" not in value:
                self._id = value
        return None

    def _dispatch(self) -> ServerEvent | None:
        name, data = self._name or "message", self._data
        self._name, self._data = "", []
        return ServerEvent(name, "\n".join(data), self._id) if data else None
