"""The prefix index: finds sessions whose memory, and running turns whose prompts, begin with given tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice

from tenuto.base.checks import MAX_COUNT
from tenuto.session.common import common_prefix
from tenuto.session.session import Session
from tenuto.session.turn import Turn

NEVER_FULL = MAX_COUNT + 1
"""A page size with which an index stays empty: no sequence has as many tokens."""
MAX_COMPARED = 8
"""The most sessions found by one page whose tokens are compared."""
MAX_COMMON = 2**18
"""A lookup stops comparing running prompts once they have had this many tokens in common with it, all together, which
takes about 0.1 ms. Otherwise the starts of many long prompts that are alike would take quadratic time."""


class PrefixIndex:
    """Finds the session of the same scope, a tenant and an adapter, whose memory has the longest common prefix with
    given tokens.

    A page of `page_size` tokens is found by the hash of its tokens and all tokens before it. A session that has a page
    has all pages before it, so a lookup finds the last page of a sequence that another session has by bisection, in
    steps that grow from its first page on. Sessions found are compared token by token: a collision of hashes only costs
    a hit.

    Invariant: a session is entered under the hashes of its first `_entered[session]` pages, all of which are in its
    memory; `_hashes[session]` begins with these hashes and may have more. `_kept` has the kept closed sessions, by the
    hash of the last page under which they are entered.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._owners: dict[int, dict[Session, None]] = {}
        self._hashes: dict[Session, list[int]] = {}
        self._entered: dict[Session, int] = {}
        self._kept: dict[int, dict[Session, None]] = {}
        self.hashed = 0  # total number of pages hashed: a measure of work
        self.looked = 0  # total number of pages looked for: a measure of work
        self.compared = 0  # total number of pairs of sessions compared: a measure of work
        self.version = 0  # raised whenever more can be found

    def __len__(self) -> int:
        return len(self._entered)

    def enter(self, session: Session) -> list[Session]:
        """Enters a session that has committed or whose memory has changed, under all full pages that are in both its
        history and its memory; none if other weights than those in use have computed any of it. Returns the kept
        sessions that it covers from now on."""
        usable = session.memory.computed if session.memory.is_current else 0
        pages = min(usable, len(session.history)) // self.page_size
        entered = self._entered.get(session, 0)
        if pages <= entered:
            self._leave(session, pages)
            return []
        hashes = self._follow(session, session.history, pages)
        alike: list[Session] = []
        for number in hashes[entered:pages]:
            self._owners.setdefault(number, {})[session] = None
            if number in self._kept:
                alike += islice(_others(self._kept[number], session), MAX_COMPARED)
        self._entered[session] = pages
        self.version += 1
        return [other for other in alike if self._covers(session, other)]

    def forked(self, parent: Session, child: Session) -> None:
        """Spares hashing for a child that has just been forked from its parent, whose scope it has."""
        self._hashes[child] = self._hashes.get(parent, [])[: len(child.history) // self.page_size]

    def changed(self, session: Session, kept: int) -> None:
        """Removes the session's entries and hashes past its first `kept` tokens, after later tokens have changed."""
        pages = kept // self.page_size
        self._leave(session, pages)
        if session in self._hashes:
            del self._hashes[session][pages:]

    def forget(self, session: Session) -> None:
        """Removes a session that is closed or has lost its memory."""
        self._leave(session, 0)
        self._hashes.pop(session, None)

    def _leave(self, session: Session, pages: int) -> None:
        """Removes the session's entries past its first `pages` pages."""
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
        """Keeps a session that is about to be closed. Returns False if it has no full page, or if another session
        covers it."""
        pages = self._entered.get(session, 0)
        if not pages:
            return False
        last = self._hashes[session][pages - 1]
        if any(self._covers(other, session) for other in islice(_others(self._owners[last], session), MAX_COMPARED)):
            return False
        self._kept.setdefault(last, {})[session] = None
        return True

    def _let_go(self, session: Session, last: int) -> None:
        """Removes the session, whose last entered page has the hash `last`, from the kept ones, if it is one."""
        kept = self._kept.get(last, {})
        if kept.pop(session, self) is None and not kept:
            del self._kept[last]

    def _covers(self, session: Session, other: Session) -> bool:
        """Whether a sequence that could begin with all entered pages of `other` can begin with the same pages of
        `session`. Both are entered under the last of these pages."""
        self.compared += 1
        most = min(len(session.history), session.memory.computed, other.memory.computed)
        common = common_prefix(session.history, other.history, most)
        return session.memory.resumable(common) >= self._entered[other] * self.page_size

    def find(self, session: Session, tokens: array[int], beyond: int) -> tuple[Session, int] | None:
        """Returns the other session whose memory has the longest common prefix with `tokens`, the sequence with which
        `session` continues, and the length of that prefix. `None` if the prefix is less than a page longer than
        `beyond`. Among a few sessions with equally many common pages, returns the one that can be resumed farthest.
        """
        owners = self._owners_of_most(session, tokens, beyond // self.page_size)
        best: tuple[int, int, Session] | None = None
        for other in islice(_others(owners, session), MAX_COMPARED):
            most = min(len(other.history), other.memory.computed)  # memory shared for its turn may exceed its history
            length = common_prefix(other.history, tokens, min(len(tokens), most))
            if best is None or (other.memory.resumable(length), length) > best[:2]:
                best = other.memory.resumable(length), length, other
        return (best[2], best[1]) if best is not None and best[1] >= beyond + self.page_size else None

    def _owners_of_most(self, session: Session, tokens: array[int], first: int) -> dict[Session, None]:
        """Finds the last page of `tokens`, from page `first` on, that another session of the tenant has. Returns all
        sessions that have it; empty if no page is found."""
        owners: dict[Session, None] = {}
        found, missing, step = first - 1, len(tokens) // self.page_size, 1
        while found + 1 < missing:
            page = found + min(step, (missing - found) // 2)
            alike = self._owners.get(self._follow(session, tokens, page + 1)[page], {})
            self.looked += 1
            if next(_others(alike, session), None) is None:
                missing = page
            else:
                owners, found, step = alike, page, 2 * step
        return owners

    def first_page(self, session: Session, tokens: array[int]) -> int | None:
        """Returns the hash of the first page of the session's sequence `tokens`, or `None` if no page is full."""
        return self._follow(session, tokens, 1)[0] if len(tokens) >= self.page_size else None

    def _follow(self, session: Session, tokens: array[int], pages: int) -> list[int]:
        """Returns the hashes of at least the first `pages` pages of the session's sequence `tokens`."""
        hashes, size = self._hashes.setdefault(session, []), self.page_size
        while len(hashes) < pages:
            before = hashes[-1] if hashes else hash(session.scope)
            begin = len(hashes) * size
            hashes.append(_digest(before, tokens[begin : begin + size].tobytes()))
            self.hashed += 1
        return hashes


class RunningPrompts:
    """The prompts of running turns, by their first page, so that other turns can share the pages they compute."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._turns: dict[int, dict[Turn, array[int]]] = {}  # by the hash of the first page
        self._hashes: dict[Turn, int] = {}
        self.common = 0  # total number of common tokens found: a measure of work

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, turn: Turn) -> None:
        """Adds a turn that has got a row."""
        tokens = turn.tokens(0, turn.resume_position)
        first = self._index.first_page(turn.session, tokens)
        if first is not None:
            self._hashes[turn] = first
            self._turns.setdefault(first, {})[turn] = tokens

    def remove(self, turn: Turn) -> None:
        """Removes a turn that has left its row."""
        first = self._hashes.pop(turn, None)
        if first is not None:
            del self._turns[first][turn]
            if not self._turns[first]:
                del self._turns[first]

    def has_alike(self, turn: Turn) -> bool:
        """Whether `alike` may find a turn. The cost does not depend on the length of the prompt."""
        if not self._turns:
            return False
        first = self._index.first_page(turn.session, turn.tokens(0, self._index.page_size))
        return any(other is not turn for other in self._turns.get(first, ())) if first is not None else False

    def alike(self, turn: Turn, tokens: array[int]) -> Iterator[tuple[Turn, int]]:
        """Yields running turns whose prompts have a common prefix with `tokens`, the sequence of `turn`, and its length
        in tokens, not counting the last token of a prompt. Prefixes shorter than a page are left out, and so are the
        turns that came last if the others' prefixes have `MAX_COMMON` tokens together."""
        first = self._index.first_page(turn.session, tokens)
        most = self.common + MAX_COMMON
        for other, others in self._turns.get(first, {}).items() if first is not None else ():
            if self.common >= most:
                break
            if other is not turn and other.session.scope == turn.session.scope:
                common = common_prefix(others, tokens, min(len(others), len(tokens)))
                self.common += common
                yield other, common


def _others(owners: dict[Session, None], session: Session) -> Iterator[Session]:
    """Returns the owners of the same scope except `session`; hashes are salted with the scope, but may collide."""
    scope = session.scope
    return (owner for owner in owners if owner is not session and owner.scope == scope)


def _digest(before: int, tokens: bytes) -> int:
    """Returns the hash of a page and the pages before it, whose hash is `before`."""
    return hash((before, tokens))
