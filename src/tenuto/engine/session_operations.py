"""Operations on sessions, except those on their turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from tenuto.base.errors import InvalidRequest, Overloaded, SessionBusy, TenutoError
from tenuto.base.options import Policy
from tenuto.base.turns import EndReason, TurnState
from tenuto.base.views import SessionState
from tenuto.base.wire.document import Conversation
from tenuto.engine.core import Core
from tenuto.engine.gate import TurnGate
from tenuto.engine.guard import guarded
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.snapshots import Snapshots
from tenuto.session.records import Made, SavedSession
from tenuto.session.session import Session


class SessionOperations:
    """Operations on sessions, each found by its id among those of `tenant`, which is empty if there are no tenants."""

    def __init__(self, core: Core, lifecycle: Lifecycle, gate: TurnGate, snapshots: Snapshots) -> None:
        self.fuse = core.fuse
        self._registry = core.registry
        self._adapters = core.adapters
        self._lifecycle = lifecycle
        self._gate = gate
        self._snapshots = snapshots
        self._counts = core.counts
        self._clock = core.clock
        self._snapshot_seconds = core.config.snapshot_seconds

    @guarded
    def open(self, session_id: str | None = None, policy: Policy | None = None, system: str | None = None) -> Session:
        """Opens a session; `system` is the system message of its conversation. An adapter that `policy` names without a
        digest must be loaded. Raises `AlreadyExists`, `Overloaded`, `ModelNotFound` or `InvalidRequest`."""
        return self._open(session_id, policy or Policy(), system)

    def _open(
        self, session_id: str | None, policy: Policy, system: str | None, *, idle: float = 0.0, journaled: bool = False
    ) -> Session:
        session = self._registry.open(session_id, self._adapters.resolve(policy), system, idle)
        self._lifecycle.came(session)
        self._counts.note("open")
        self._lifecycle.pressure.note(session)
        if not journaled:
            self._lifecycle.note("open", session)
        return session

    @guarded
    def fork(
        self,
        session_id: str,
        *,
        turn: int | None = None,
        position: int | None = None,
        child: str | None = None,
        tenant: str = "",
        metadata: tuple[tuple[str, str], ...] | None = None,
        hidden: bool | None = None,
    ) -> Session:
        """Opens a session that starts with the first `turn` turns, or `position` tokens, or all of this one's history,
        without an open turn. It gets this one's metadata unless `metadata` is given, is hidden like this one unless
        `hidden` is given, and is not pinned."""
        parent = self._registry.get(session_id, tenant)
        parent.require_open()
        at = self._position(parent, turn, position)
        notes = parent.policy.metadata if metadata is None else metadata
        hides = parent.policy.hidden if hidden is None else hidden
        policy = replace(parent.policy, ephemeral=False, pinned=False, metadata=notes, hidden=hides)
        forked = self.open(child, policy, parent.system)
        self._counts.replayed["fork"] += parent.memory.replayed(max(0, at - 1))
        parent.fork(forked, at)
        self._lifecycle.sharing.index.forked(parent, forked)
        self._registry.note_length(forked)
        self._lifecycle.note_memory(forked)
        self._counts.note("fork", TurnState.RUNNING if parent.has_running_turn else None)
        self._lifecycle.note("fork", forked, kept=at, parent=parent)
        return forked

    @guarded
    def rewind(
        self, session_id: str, *, turn: int | None = None, position: int | None = None, tenant: str = ""
    ) -> Session:
        """Cuts the history to its first `turn` turns or `position` tokens. Raises `SessionBusy` if a turn is open."""
        session = self._registry.get(session_id, tenant)
        session.require_idle("rewind")
        if turn is None and position is None:
            raise InvalidRequest("rewind needs the number of turns or of tokens to keep")
        at = self._position(session, turn, position)
        self._counts.replayed["rewind"] += session.memory.replayed(max(0, at - 1))
        session.rewind(at)
        self._registry.note_length(session)
        self._lifecycle.note_memory(session)
        self._counts.note("rewind")
        self._lifecycle.note("rewind", session, kept=len(session.history))
        return session

    @guarded
    def replace(self, session_id: str, source_id: str, *, tenant: str = "") -> Session:
        """Replaces the history of a session by that of another, without that one's open turn, and its memory where the
        other's goes farther. The other session stays as it is. Raises `SessionBusy` if a turn of the first is open,
        `ContextExceeded`, and `InvalidRequest` if their memory cannot be shared, because their adapters differ."""
        session, source = self._registry.get(session_id, tenant), self._registry.get(source_id, tenant)
        session.require_idle("replace the history of")
        source.require_open()
        if session.scope != source.scope:
            raise InvalidRequest(f"sessions {session_id} and {source_id} have different adapters; allowed: the same")
        self._gate.allowed(session, len(source.history), 0)
        kept, same = session.replace_history(source)
        self._registry.note_length(session)
        self._lifecycle.replaced(session, source, kept, same)
        self._counts.note("replace")
        return session

    @guarded
    def adopt(
        self,
        session_id: str,
        tokens: Iterable[int],
        output: Iterable[int],
        conversation: Conversation | None = None,
        *,
        cut: bool = False,
        made: Made | None = None,
        tenant: str = "",
    ) -> Session:
        """Commits a turn that was computed elsewhere: its tokens join the history, and are computed here when needed.
        `conversation`, `cut`, `made`: see `TurnRecord`. Raises `SessionBusy`, `ContextExceeded` or `InvalidRequest`."""
        given, answer = self._gate.read(tokens), self._gate.read(output)
        session = self._registry.get(session_id, tenant)
        session.require_idle("add a turn to")
        self._gate.allowed(session, len(session.history) + len(given) + len(answer), 0)
        session.adopt(given, answer, self._clock.now(), conversation, cut, made)
        self._registry.note_length(session)
        self._registry.watch(session)
        self._counts.note("adopt")
        self._lifecycle.note("adopt", session, kept=len(session.history) - len(given) - len(answer))
        return session

    @guarded
    def restore(self, saved: SavedSession, *, journaled: bool = False, rested: float | None = None) -> Session:
        """Opens a session that was saved by this engine or another; its history is computed again when needed.
        `rested`: the seconds since a turn of it was open; by default those since `saved.used`, if that is known. A
        pinned session without room is opened unpinned. `journaled`: it comes from the journal of this model's sessions,
        where it stays; its tokens were checked before they were written. Raises the errors of `open`, and
        `ContextExceeded` if it is longer than sessions may be here."""
        if not journaled:
            self._gate.read(saved.tokens)
        if rested is None:
            rested = self._clock.wall() - saved.used if saved.used is not None else 0.0
        open_with = partial(self._open, saved.session, system=saved.system, idle=rested, journaled=journaled)
        try:
            session = open_with(policy=saved.policy)
        except Overloaded:
            if not saved.policy.pinned:
                raise
            session = open_with(policy=replace(saved.policy, pinned=False))
        try:
            self._gate.allowed(session, len(saved.tokens), 0)
        except TenutoError:
            self._lifecycle.close(session)
            raise
        session.restore(saved)
        origin = saved.origin
        parent = self._registry.find(origin.parent, session.policy.tenant) if origin is not None else None
        if origin is not None and parent is not None and parent.birth == origin.birth:
            session.join(parent)
        self._registry.note_length(session)
        self._counts.note("restore")
        if not journaled:
            self._lifecycle.note("restore", session)
        return session

    @staticmethod
    def _position(session: Session, turn: int | None, position: int | None) -> int:
        if turn is not None and position is not None:
            raise InvalidRequest("give a number of turns or a token position, not both")
        if turn is not None:
            return session.turn_boundary(turn)
        return session.check_position(position if position is not None else len(session.history))

    @guarded
    def expect(
        self, session_id: str, within: float | None = None, *, calls: Sequence[str] = (), tenant: str = ""
    ) -> Session:
        """Expects the next turn of a session within so many seconds; `None`: no longer, or with `calls`, the names of
        the tools that its last turn called, in the time that they took before. Raises `SessionBusy` if a turn is
        open that is no draft, and `InvalidRequest`."""
        session = self._registry.get(session_id, tenant)
        session.require_open()
        if session.turn is not None and not session.turn.drafting:
            session.require_idle("expect a turn of")
        self._lifecycle.expectations.expect(session, within, tuple(sorted(set(calls))))
        return session

    @guarded
    def close(self, session_id: str, *, finish: bool = False, tenant: str = "") -> None:
        """Closes a session and aborts its open turn. With `finish`, a submitted turn may end first, but not a draft."""
        session = self._registry.get(session_id, tenant)
        turn = session.turn
        if turn is not None and finish and not turn.drafting:
            session.state = SessionState.CLOSING
            self._counts.note("closing")
            return
        if turn is not None:
            session.state = SessionState.CLOSING
            self._lifecycle.abort(turn, EndReason.ABORT)  # closes the session
            return
        self._lifecycle.close(session)

    @guarded
    def leave(self, session: Session, *, keep_saved: bool = False) -> None:
        """Removes a session that another replica owns by now, if it is still here: its turn is aborted, its memory is
        dropped, and nothing is journaled. `keep_saved`: its saved state stays for that replica."""
        if self._registry.find(session.id, session.policy.tenant) is not session:
            return
        if session.turn is not None:
            session.turn.recorded = False  # the other replica has its request
            self._lifecycle.abort(session.turn, EndReason.ABORT)
        if session.state is not SessionState.CLOSED:
            self._lifecycle.leave(session, keep_saved=keep_saved)

    @guarded
    def drop(self, session_id: str | None = None, *, tenant: str = "") -> int:
        """Drops a session, or all sessions, without a running turn to its tokens, which are computed again when needed.
        Returns the number of sessions that held memory."""
        if session_id is None:
            sessions = [session for session in self._registry if not session.has_running_turn]
            return sum(map(self._lifecycle.flush, [*sessions, *self._registry.prefixes]))
        session = self._registry.get(session_id, tenant)
        if session.has_running_turn:
            raise SessionBusy(f"cannot drop session {session_id}: its turn is running")
        return int(self._lifecycle.flush(session))

    @guarded
    def park(self, session_id: str, *, tenant: str = "") -> Session:
        """Moves an idle session off the device: to a tier, or if there is none with room, to its tokens, from which it
        is computed again. Raises `SessionBusy` if a turn is open, and `InvalidRequest` if the session is pinned."""
        session = self._registry.get(session_id, tenant)
        session.require_idle("park")
        if session.policy.pinned:
            raise InvalidRequest(f"session {session_id} is pinned; allowed: a session that is not")
        self._lifecycle.expectations.forget(session)
        if session.memory.computed:
            self._lifecycle.drop(session, "made way")
        return session

    def leave_device(self, sessions: Iterable[Session]) -> None:
        """Moves these sessions off the device, except those that have an open turn by now."""
        for session in sessions:
            if session.turn is None and session.memory.computed:
                self._lifecycle.drop(session)

    @guarded
    def recover(self) -> None:
        """Parks sessions that were just restored with their memory that an earlier engine has left in the disk tier.
        Removes all other files of that engine."""
        self._snapshots.recover(self._registry)

    @guarded
    def save(self) -> None:
        """Aborts open turns, and writes the memory of lasting sessions to the disk tier, as far as `snapshot_seconds`
        allow, for `recover` to find. Only `end` may follow."""
        for session in list(self._registry):
            if session.turn is not None:
                self._lifecycle.abort(session.turn, EndReason.ABORT)
        lasting = [session for session in self._registry if session.policy.lasting]
        self._snapshots.save(lasting, self._snapshot_seconds)
