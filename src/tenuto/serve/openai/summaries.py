"""Summaries in the content of compactions, which clients send back without reading them."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Self

PREFIX = "tenuto-summary:"
"""The beginning of a compaction's content, which is not secret: base64 of the summary follows."""
MAX_AFTER = 9999


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of a conversation. `after`: how many of the items before the compaction it does not cover."""

    text: str
    after: int = 0

    def content(self) -> str:
        """Returns the content of the compaction."""
        more = f":{self.after}" if self.after else ""
        return f"{PREFIX}{b64encode(self.text.encode()).decode()}{more}"

    @classmethod
    def of(cls, content: str) -> Self | None:
        """Returns the summary in the content of a compaction, or `None` if this server did not write it."""
        encoded, _, after = content.removeprefix(PREFIX).partition(":")
        if not content.startswith(PREFIX) or not (after or "0").isdecimal() or len(after) > len(str(MAX_AFTER)):
            return None
        try:
            return cls(b64decode(encoded, validate=True).decode(), int(after or "0"))
        except ValueError:
            return None
