"""Sharing of prefixes: turns begin with other sequences' memory of the same tokens, or wait until it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tenuto.base.views import SessionState
from tenuto.engine.core import Core
from tenuto.sched.batch import continues_from
from tenuto.sched.pressure import Pressure
from tenuto.session.prefixes import RunningPrompts
from tenuto.session.session import Session
from tenuto.session.turn import Turn

HITS = ("open", "closed", "running")
"""The owner of the memory that a turn begins with: an open session, a kept closed session, or a running turn."""
NO_ROOM = "no room"
MISSES = ("nothing alike", "no checkpoint", "own checkpoint", "scored", NO_ROOM)
"""The reason why a turn computes a page or more itself: no sequence has the same tokens, or has a checkpoint there; its
session would lose a checkpoint; its input is scored or averaged; or it does not fit beside the memory to share."""


@dataclass(frozen=True, slots=True)
class Found:
    """Memory with which a turn can begin: the first `position` tokens of `session`; `running`: of its open turn."""

    session: Session
    position: int
    running: bool


@dataclass(slots=True)
class Wait:
    """A turn's wait until `provider` has computed `goal` tokens; `goal` is 0 once `provider` has left its row."""

    provider: Turn
    goal: int


class Sharing:
    """Lets turns begin with other sequences' memory of the same tokens, found in `index`.

    A turn that gets a row, while an earlier turn of no lower priority (its provider) computes their common prefix,
    waits in its row for the prefix. It goes on as soon as the prefix is settled or the provider leaves its row. So a
    turn never waits for one that could wait for it, or for tokens that it would not compute itself. The provider makes
    a checkpoint at the end of the prefix, if the model needs one.

    Invariant: `_waits` has exactly the turns in rows that wait; the rows of those whose provider has a row are in
    `Batch.held`.
    """

    def __init__(self, core: Core, pressure: Pressure) -> None:
        self._memory = core.memory
        self.index = core.prefixes
        self._sessions = core.registry
        self._batch = core.batch
        self._pressure = pressure
        self._aging = core.config.aging_seconds
        self._running = RunningPrompts(core.prefixes)
        self._waits: dict[Turn, Wait] = {}
        self._counts = core.counts

    # -- before a turn has a row

    def share(self, turn: Turn) -> None:
        """Lets a waiting turn that holds no memory begin with another sequence's memory, if that covers at least a page
        more of its tokens than its session's memory does."""
        if turn.session.memory.turn is not None:
            return
        if turn.looked in HITS:  # the turn has lost the memory it found
            turn.looked = ""
        found = self._find(turn)
        if found is not None:
            self.begin_with(turn, found)

    def _find(self, turn: Turn) -> Found | None:
        have, cause = continues_from(turn), self._cannot_share(turn)
        least = have + self.index.page_size
        if turn.drafting or turn.resume_position < least:
            return None
        if cause:
            turn.looked = cause
            return None
        best = self._best(turn, have) if turn.sought != self.index.version or self._running.has_alike(turn) else None
        if best is not None and best.position >= least:
            return best
        if turn.looked not in HITS and (best is not None or not turn.looked):
            turn.looked = "no checkpoint" if best is not None else "nothing alike"
        return None

    def _best(self, turn: Turn, have: int) -> Found | None:
        """Returns the memory with a common prefix at least a page longer than the `have` tokens of the turn's session;
        among several, the one with the highest position to begin at. That position may be 0, without a checkpoint."""
        tokens, best = turn.tokens(0, turn.resume_position), None
        if turn.sought != self.index.version:
            turn.sought = self.index.version
            owner = self.index.find(turn.session, tokens, have)
            if owner is not None:
                best = Found(owner[0], owner[0].memory.resumable(owner[1]), running=False)
        for other, common in self._running.alike(turn, tokens):
            memory = other.session.memory.turn
            if memory is not None and min(common, memory.computed) >= have + self.index.page_size:
                position = memory.shareable(common)
                if best is None or position > best.position:
                    best = Found(other.session, position, running=True)
        return best

    def _cannot_share(self, turn: Turn) -> str:
        """Returns the reason why the turn may not share other memory; empty if it may. After an abort a session has to
        stand where it did before, so it gives up no checkpoint."""
        if turn.looked == NO_ROOM:
            return NO_ROOM
        if turn.params.needs_input:
            return "scored"
        return "own checkpoint" if turn.session.memory.computed and self._memory.needs_checkpoints else ""

    def begin_with(self, turn: Turn, found: Found) -> None:
        """Replaces the memory of the turn's session, which has no turn in memory, by the memory that was found."""
        session, owner = turn.session, found.session
        more = found.position - session.memory.computed
        session.memory.drop()
        if found.running and owner.memory.turn is not None:
            owner.memory.turn.fork(session.memory, found.position)
        else:
            owner.memory.fork(session.memory, found.position)
        kind = "running" if found.running else "closed" if owner.state is SessionState.CLOSED else "open"
        turn.looked = kind
        self._counts.prefix_tokens[kind] += more
        self._sessions.use_prefix(owner)
        self._pressure.note(owner)
        self._pressure.note(session)

    def no_room(self, turn: Turn) -> None:
        """Records that the turn does not fit beside its session's memory, and begins from nothing."""
        if turn.resume_position >= self.index.page_size:
            turn.looked = NO_ROOM

    def note_memory(self, session: Session) -> list[Session]:
        """Updates the index after the memory of the session, open or closed, has changed. Returns the kept closed
        sessions that it covers from now on."""
        if session.state is SessionState.CLOSED and not session.memory.computed:
            self.index.forget(session)
            return []
        if session.turn is None:
            self.index.changed(session, len(session.history))
        return self.index.enter(session)

    # -- while it has a row

    def started(self, turn: Turn) -> None:
        """Records that the turn has got a row. It may wait there, and other turns may wait for it, unless other weights
        than those in use have computed some of what it continues."""
        if turn.drafting or turn.resume_position < self.index.page_size or not self._is_current(turn):
            return
        self._running.add(turn)
        wait = self._worth_waiting(turn)
        if wait is not None:
            self._waits[turn] = wait
            self._batch.held.add(self._batch.row_of(turn))
            if self._memory.needs_checkpoints:
                self._batch.mark_at(wait.provider, wait.goal)

    def waits(self, turn: Turn) -> bool:
        """Whether the turn waits in its row for another turn."""
        return turn in self._waits

    def counted(self, turn: Turn) -> None:
        """Counts the outcome of the turn's lookup, when it begins to compute for the first time."""
        if turn.looked:
            self._counts.prefix_lookups[turn.looked] += 1

    def left(self, turn: Turn) -> None:
        """Records that the turn is about to leave its row. Turns that wait for it continue at the next step."""
        self._running.remove(turn)
        if self._waits.pop(turn, None) is not None:
            self._batch.held.discard(self._batch.row_of(turn))
        for other, wait in self._waits.items():
            if wait.provider is turn:
                wait.goal = 0
                self._batch.held.discard(self._batch.row_of(other))

    def ready(self) -> Iterator[tuple[Turn, Found | None]]:
        """Yields turns that need not wait any longer, each with the memory it begins with now, or `None` to continue
        unchanged."""
        for turn, wait in list(self._waits.items()):
            theirs = wait.provider.session.memory.turn
            if wait.goal and theirs is not None and theirs.computed < wait.goal:
                continue
            del self._waits[turn]
            self._batch.held.discard(self._batch.row_of(turn))
            yield turn, None if self._has_begun(turn) else self._find(turn)

    @staticmethod
    def _is_current(turn: Turn) -> bool:
        """Whether the weights in use have computed all of the memory of the turn, which is in a row."""
        memory = turn.session.memory.turn
        return memory is None or memory.is_current

    @staticmethod
    def _has_begun(turn: Turn) -> bool:
        """Whether the turn, which is in a row, has computed anything."""
        memory = turn.session.memory.turn
        return memory is None or memory.has_begun

    def _worth_waiting(self, turn: Turn) -> Wait | None:
        """Returns the wait for the turn that computes the longest common prefix, among turns that yield later; `None`
        if waiting would save less than a page."""
        least = continues_from(turn) + self.index.page_size
        if turn.resume_position < least or self._cannot_share(turn) or self._has_begun(turn):
            return None
        tokens = turn.tokens(0, turn.resume_position)
        best: Wait | None = None
        for other, common in self._running.alike(turn, tokens):
            if other.priority < turn.priority or other.rank(self._aging) > turn.rank(self._aging):
                continue
            goal = self._goal(other, common)
            theirs = other.session.memory.turn
            if theirs is None or theirs.computed >= goal or goal < max(least, best.goal + 1 if best is not None else 0):
                continue
            best = Wait(other, goal)
        return best

    def _goal(self, other: Turn, common: int) -> int:
        """Returns the highest position, at or below `common`, at which another turn can begin with the memory of the
        running turn `other`."""
        memory = other.session.memory.turn
        if not self._memory.needs_checkpoints or memory is None:
            return common
        if common == other.resume_position and other.generating:
            return common  # `other` makes a checkpoint there anyway
        aligned = common - common % self._memory.page_size
        if aligned > memory.scheduled:
            return aligned
        made = memory.checkpoints.below(common + 1)
        return made.position if made is not None else 0
