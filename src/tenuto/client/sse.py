"""An incremental parser of server-sent events (HTML standard, section 9.2.6)."""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


class ServerEvent(NamedTuple):
    """One event. `name` defaults to "message"; `id` is the last id in the stream so far."""

    name: str
    data: str
    id: str


class EventParser:
    """Parses a stream that arrives in arbitrary pieces. An incomplete event at the end is discarded."""

    def __init__(self) -> None:
        self._rest = b""  # the incomplete last line
        self._after_cr = False  # a newline at the start of the next piece belongs to the last line end
        self._begun = False  # the place of a byte order mark has been passed
        self._name = ""
        self._data: list[str] = []
        self._id = ""

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """Returns the events that `piece` completes."""
        if not piece:
            return []
        if self._after_cr:
            piece = piece.removeprefix(b"\n")
        self._after_cr = piece.endswith(b"\r")
        whole = self._rest + piece if self._rest else piece
        if not self._begun:
            if whole != _BOM and _BOM.startswith(whole):  # the next piece may complete the mark
                self._rest = whole
                return []
            whole, self._begun = whole.removeprefix(_BOM), True
        *lines, self._rest = whole.split(b"\n") if b"\r" not in whole else _LINE_END.split(whole)
        events: list[ServerEvent] = []
        for line in lines:
            if line:
                self._field(line.decode(errors="replace"))
            elif (event := self._dispatch()) is not None:
                events.append(event)
        return events

    def _field(self, line: str) -> None:
        field, _, value = line.partition(":")  # comments have an empty field name
        if value[:1] == " ":
            value = value[1:]
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        elif field == "id" and "\0" not in value:
            self._id = value

    def _dispatch(self) -> ServerEvent | None:
        name, data = self._name or "message", self._data
        self._name = ""
        if not data:
            return None
        self._data = []
        return ServerEvent(name, data[0] if len(data) == 1 else "\n".join(data), self._id)
