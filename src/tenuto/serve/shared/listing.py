"""Lists of sessions that several servers have."""

from __future__ import annotations

from collections.abc import Sequence

from tenuto.base.views import Listing, SessionInfo


def merged(listings: Sequence[Listing], limit: int) -> Listing:
    """Returns the first sessions of all `listings`, at most `limit`. One that has moved while they were made may be in
    several of them, and is taken from the first."""
    ends = [listing.sessions[-1].session_id for listing in listings if listing.more]
    found: dict[str, SessionInfo] = {}
    for listing in listings:
        for info in listing.sessions:
            if not ends or info.session_id <= min(ends):
                found.setdefault(info.session_id, info)
    first = [found[session] for session in sorted(found)[:limit]]
    turns = {session: turn for listing in reversed(listings) for session, turn in listing.turns.items()}
    return Listing(sessions=first, turns=turns, more=bool(ends) or len(first) < len(found))
