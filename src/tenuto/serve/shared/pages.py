"""Pages of lists, in the form of Anthropic's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Query

from tenuto.base.errors import NotFound

Cursor = Annotated[str | None, Query(max_length=256, description="The page ends at this id, or begins after it.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Maximum number of entries.")]


def page(entries: Sequence[dict[str, Any]], after: str | None, before: str | None, limit: int) -> dict[str, Any]:
    """Returns at most `limit` entries: those next to the entry with the id `after` or `before`, or the first ones.
    Raises `NotFound`."""
    ids = [entry["id"] for entry in entries]
    for cursor in (after, before):
        if cursor is not None and cursor not in ids:
            raise NotFound(f"the list has no entry {cursor!r}; allowed: the id of an entry, or none")
    begin = ids.index(after) + 1 if after is not None else 0
    end = ids.index(before) if before is not None else len(ids)
    within = entries[begin:end]
    found = within[:limit] if before is None else within[-limit:]
    return {
        "data": found,
        "has_more": len(found) < len(within),
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
    }
