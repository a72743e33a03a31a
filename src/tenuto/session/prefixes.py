"""The prefix index: which memory begins with given tokens."""

from __future__ import annotations

from array import array

from tenuto.session.session import Session


class PrefixIndex:
    """Finds the session of a tenant whose memory begins with the most of some tokens.

    A page of `page_size` tokens is found by the hash of its tokens and all before it, so a sequence is followed from
    its first page on for as long as someone has the next. What is found is compared token by token: hashes that collide
    only cost a hit.

    Invariant: a session is entered under the hashes of its first `_entered[session]` pages, all of which are in its
    memory; `_hashes[session]` begins with those, and may know more.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._owners: dict[int, dict[Session, None]] = {}
        self._hashes: dict[Session, list[int]] = {}
        self._entered: dict[Session, int] = {}
        self.hashed = 0  # pages, ever: a measure of work
        self.version = 0  # raised whenever more can be found

    def __len__(self) -> int:
        return len(self._entered)

    def enter(self, session: Session) -> None:
        """The session has committed, or its memory has changed: it is found by the full pages that both have."""
        pages = min(session.memory.computed, len(session.history)) // self._page_size
        entered = self._entered.get(session, 0)
        if pages <= entered:
            self._leave(session, pages)
            return
        hashes = self._follow(session, session.history, pages)
        for number in hashes[entered:pages]:
            self._owners.setdefault(number, {})[session] = None
        self._entered[session] = pages
        self.version += 1

    def changed(self, session: Session, kept: int) -> None:
        """Only the first `kept` tokens of what the session has entered, or looked for, still count."""
        pages = kept // self._page_size
        self._leave(session, pages)
        if session in self._hashes:
            del self._hashes[session][pages:]

    def forget(self, session: Session) -> None:
        """The session is gone, or has no memory any more."""
        self._leave(session, 0)
        self._hashes.pop(session, None)

    def _leave(self, session: Session, pages: int) -> None:
        """The session is no longer found by more than its first `pages` pages."""
        entered = self._entered.pop(session, 0)
        for number in self._hashes.get(session, [])[pages:entered]:
            owners = self._owners[number]
            owners.pop(session, None)
            if not owners:
                del self._owners[number]
        if min(pages, entered):
            self._entered[session] = min(pages, entered)

    def covers(self, session: Session, other: Session) -> bool:
        """Whether the session is found by every page that `other` is."""
        pages = self._entered.get(other, 0)
        if pages == 0 or self._entered.get(session, 0) < pages:
            return pages == 0
        return self._hashes[session][pages - 1] == self._hashes[other][pages - 1]

    def find(self, session: Session, tokens: array[int], beyond: int) -> tuple[Session, int] | None:
        """Another session whose memory begins with the most of `tokens`, the sequence that `session` goes on with, and
        with how many; `None` if with less than a page more than `beyond`."""
        found: Session | None = None
        for page in range(beyond // self._page_size, len(tokens) // self._page_size):
            owners = self._owners.get(self._follow(session, tokens, page + 1)[page], {})
            other = next((owner for owner in owners if owner is not session), None)
            if other is None:
                break
            found = other
        if found is None:
            return None
        length = _common(found.history, tokens, min(len(tokens), found.memory.computed))
        return (found, length) if length >= beyond + self._page_size else None

    def _follow(self, session: Session, tokens: array[int], pages: int) -> list[int]:
        """The hashes of at least the first `pages` pages of the session's sequence `tokens`."""
        hashes, size = self._hashes.setdefault(session, []), self._page_size
        while len(hashes) < pages:
            before = hashes[-1] if hashes else hash(session.policy.tenant)
            begin = len(hashes) * size
            hashes.append(_digest(before, tokens[begin : begin + size].tobytes()))
            self.hashed += 1
        return hashes


def _digest(before: int, tokens: bytes) -> int:
    """The hash of a page and all before it, which have the hash `before`."""
    return hash((before, tokens))


def _common(first: array[int], second: array[int], most: int) -> int:
    """With how many equal tokens both begin, up to `most`."""
    low = 0
    while low < most:
        step = min(4096, most - low)
        if first[low : low + step] == second[low : low + step]:
            low += step
            continue
        return low + next(i for i in range(step) if first[low + i] != second[low + i])
    return most
