"""The prefix index: which memory begins with given tokens, and which running turns do."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice

from tenuto.session.session import Session
from tenuto.session.turn import Turn

MAX_COMPARED = 8
"""Sessions found by one page that are compared with another."""


class PrefixIndex:
    """Finds the session of a tenant whose memory begins with the most of some tokens.

    A page of `page_size` tokens is found by the hash of its tokens and all before it, so a sequence is followed from
    its first page on for as long as someone has the next. What is found is compared token by token: hashes that collide
    only cost a hit.

    Invariant: a session is entered under the hashes of its first `_entered[session]` pages, all of which are in its
    memory; `_hashes[session]` begins with those, and may know more. `_kept` has the closed sessions that are kept, by
    the hash of the last page that they are entered under.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._owners: dict[int, dict[Session, None]] = {}
        self._hashes: dict[Session, list[int]] = {}
        self._entered: dict[Session, int] = {}
        self._kept: dict[int, dict[Session, None]] = {}
        self.hashed = 0  # pages, ever: a measure of work
        self.compared = 0  # pairs of sessions, ever: likewise
        self.version = 0  # raised whenever more can be found

    def __len__(self) -> int:
        return len(self._entered)

    def enter(self, session: Session) -> list[Session]:
        """The session has committed, or its memory has changed: it is found by the full pages that both have. Returns
        kept sessions that it covers from now on."""
        pages = min(session.memory.computed, len(session.history)) // self.page_size
        entered = self._entered.get(session, 0)
        if pages <= entered:
            self._leave(session, pages)
            return []
        hashes = self._follow(session, session.history, pages)
        alike: list[Session] = []
        for number in hashes[entered:pages]:
            self._owners.setdefault(number, {})[session] = None
            alike += islice(_others(self._kept.get(number, {}), session), MAX_COMPARED)
        self._entered[session] = pages
        self.version += 1
        return [other for other in alike if self._covers(session, other)]

    def changed(self, session: Session, kept: int) -> None:
        """Only the first `kept` tokens of what the session has entered, or looked for, still count."""
        pages = kept // self.page_size
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
        if pages < entered:
            self._let_go(session, self._hashes[session][entered - 1])
        for number in self._hashes.get(session, [])[pages:entered]:
            owners = self._owners[number]
            owners.pop(session, None)
            if not owners:
                del self._owners[number]
        if min(pages, entered):
            self._entered[session] = min(pages, entered)

    # -- closed sessions

    def keep(self, session: Session) -> bool:
        """Keep a session that is about to be closed. False if it has no full page, or if another session covers it."""
        pages = self._entered.get(session, 0)
        if not pages:
            return False
        last = self._hashes[session][pages - 1]
        if any(self._covers(other, session) for other in islice(_others(self._owners[last], session), MAX_COMPARED)):
            return False
        self._kept.setdefault(last, {})[session] = None
        return True

    def _let_go(self, session: Session, last: int) -> None:
        """The session is not kept any more, if it was, under the hash of its last page."""
        kept = self._kept.get(last, {})
        if kept.pop(session, self) is None and not kept:
            del self._kept[last]

    def _covers(self, session: Session, other: Session) -> bool:
        """Whether a sequence that could begin with all full pages of `other` can begin with the same pages of
        `session`. Both are found by the last of these."""
        self.compared += 1
        most = min(len(session.history), session.memory.computed, other.memory.computed)
        common = _common(session.history, other.history, most)
        return session.memory.resumable(common) >= self._entered[other] * self.page_size

    def find(self, session: Session, tokens: array[int], beyond: int) -> tuple[Session, int] | None:
        """Another session whose memory begins with the most of `tokens`, the sequence that `session` goes on with, and
        with how many; `None` if with less than a page more than `beyond`. Of a few that have as many pages, it is the
        one that can be resumed farthest."""
        owners: dict[Session, None] = {}
        for page in range(beyond // self.page_size, len(tokens) // self.page_size):
            alike = self._owners.get(self._follow(session, tokens, page + 1)[page], {})
            if next(_others(alike, session), None) is None:
                break
            owners = alike
        best: tuple[int, int, Session] | None = None
        for other in islice(_others(owners, session), MAX_COMPARED):
            most = min(len(other.history), other.memory.computed)  # what it found elsewhere for its turn is no history
            length = _common(other.history, tokens, min(len(tokens), most))
            if best is None or (other.memory.resumable(length), length) > best[:2]:
                best = other.memory.resumable(length), length, other
        return (best[2], best[1]) if best is not None and best[1] >= beyond + self.page_size else None

    def first_page(self, session: Session, tokens: array[int]) -> int | None:
        """The hash of the first page of the session's sequence `tokens`, if it has one."""
        return self._follow(session, tokens, 1)[0] if len(tokens) >= self.page_size else None

    def _follow(self, session: Session, tokens: array[int], pages: int) -> list[int]:
        """The hashes of at least the first `pages` pages of the session's sequence `tokens`."""
        hashes, size = self._hashes.setdefault(session, []), self.page_size
        while len(hashes) < pages:
            before = hashes[-1] if hashes else hash(session.policy.tenant)
            begin = len(hashes) * size
            hashes.append(_digest(before, tokens[begin : begin + size].tobytes()))
            self.hashed += 1
        return hashes


class RunningPrompts:
    """The prompts of running turns, by their first page, so that others can begin with what they compute."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._turns: dict[int, dict[Turn, array[int]]] = {}  # by the hash of the first page
        self._hashes: dict[Turn, int] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, turn: Turn) -> None:
        """The turn has got a row."""
        tokens = turn.tokens(0, turn.resume_position)
        first = self._index.first_page(turn.session, tokens)
        if first is not None:
            self._hashes[turn] = first
            self._turns.setdefault(first, {})[turn] = tokens

    def remove(self, turn: Turn) -> None:
        """The turn has left its row."""
        first = self._hashes.pop(turn, None)
        if first is not None:
            del self._turns[first][turn]
            if not self._turns[first]:
                del self._turns[first]

    def has_alike(self, turn: Turn) -> bool:
        """Whether `alike` may have something to say. Costs no more with a long prompt."""
        if not self._turns:
            return False
        first = self._index.first_page(turn.session, turn.tokens(0, self._index.page_size))
        return any(other is not turn for other in self._turns.get(first, ())) if first is not None else False

    def alike(self, turn: Turn, tokens: array[int]) -> Iterator[tuple[Turn, int]]:
        """Running turns whose prompts, all but the last token, begin with as many of `tokens`, the sequence of `turn`,
        as is said; those with less than a page are left out."""
        first = self._index.first_page(turn.session, tokens)
        for other, others in self._turns.get(first, {}).items() if first is not None else ():
            if other is not turn and other.session.policy.tenant == turn.session.policy.tenant:
                yield other, _common(others, tokens, min(len(others), len(tokens)))


def _others(owners: dict[Session, None], session: Session) -> Iterator[Session]:
    """Those that are not `session`, of its tenant: hashes are salted with the tenant, but may collide."""
    tenant = session.policy.tenant
    return (owner for owner in owners if owner is not session and owner.policy.tenant == tenant)


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
