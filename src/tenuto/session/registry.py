"""All open sessions, by tenant and id, and when idle ones expire."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain, count
from random import Random

from tenuto.base.checks import check_unicode, shown
from tenuto.base.clock import Clock
from tenuto.base.errors import AlreadyExists, IllegalTransition, InvalidRequest, NotFound, Overloaded
from tenuto.base.options import Policy
from tenuto.base.views import SessionKey, SessionState, StateFilter
from tenuto.memory.memory import Memory, session_units
from tenuto.memory.pool import Holder
from tenuto.memory.session_memory import SessionMemory, all_holders
from tenuto.session.pins import Pins
from tenuto.session.session import Session
from tenuto.session.tenants import Tenant
from tenuto.session.turn import Turn

MAX_ID_LENGTH = 128
UNREACHABLE = frozenset({".", ".."})
"""Clients take these for parts of a path and leave them out of URLs, so no session may be called that."""


REST_SHARE = 0.5
"""The part of its TTL after which an idle session is to leave the device, if it can be brought back."""
MAX_EXPIRED = 128
"""Sessions that expire, or are to leave the device, at once; others that are due follow at the next look."""
GRACE_SECONDS = 60.0
"""How long a session that is restored stays at least, unless its TTL is shorter: so long may a restart take."""


class Registry:
    """Opens, finds, expires and forgets sessions. Work grows with the sessions concerned, not with those there are."""

    def __init__(self, memory: Memory, clock: Clock, random: Random, context_length: int, max_sessions: int) -> None:
        self._memory = memory
        self._clock = clock
        self._random = random
        self.context_length = min(context_length, memory.max_length)  # tokens that fit a session at the most
        self.pins = Pins(memory, context_length)
        self._max_sessions = max_sessions
        self._sessions: dict[SessionKey, Session] = {}
        self.prefixes: dict[Session, None] = {}  # closed sessions whose memory is kept, in the order of their last use
        self._tenants: dict[str, Tenant] = {}  # by name; those without sessions are not there
        self._expiries: list[tuple[float, int, SessionKey]] = []  # a heap; too early if there was a turn since
        self._watched: dict[SessionKey, int] = {}  # session -> its live entry
        self._resting: list[Session] = []  # since they were last taken
        self.more_expired = False  # more were due than `expired` found at the last look
        self._entries = count(1)
        self.visited = 0  # sessions that were listed, or looked at for that, ever: a measure of work

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def find(self, session_id: str, tenant: str = "") -> Session | None:
        """The session that a tenant calls so, if there is one."""
        return self._sessions.get((tenant, session_id))

    def get(self, session_id: str, tenant: str = "") -> Session:
        """As `find`. Raises `NotFound`."""
        session = self.find(session_id, tenant)
        if session is None:
            raise NotFound(f"there is no session {session_id!r}; it was never opened, was closed, or has expired")
        return session

    def turn(self, session_id: str, tenant: str = "") -> Turn:
        """The open turn of a session. Raises `NotFound`, `IllegalTransition` if it has none."""
        turn = self.get(session_id, tenant).turn
        if turn is None:
            raise IllegalTransition(f"session {session_id} has no open turn")
        return turn

    def open(self, session_id: str | None, policy: Policy, system: str | None = None) -> Session:
        """A new, empty session; `system` opens its conversation. Raises `AlreadyExists`, `Overloaded` or
        `InvalidRequest`."""
        if session_id is None:
            session_id = f"{self._random.getrandbits(96):024x}"
        if type(session_id) is not str or not session_id.isprintable() or not 0 < len(session_id) <= MAX_ID_LENGTH:
            raise InvalidRequest(
                f"session id is {shown(session_id)}; allowed: 1 to {MAX_ID_LENGTH} printable characters"
            )
        if not UNREACHABLE.isdisjoint(session_id.split("/")):
            raise InvalidRequest(
                f"session id is {shown(session_id)}; allowed: ids that are not '.' or '..' and have no such part"
            )
        check_unicode("system", system or "")
        for part in chain.from_iterable(policy.metadata):
            check_unicode("metadata", part)
        if (policy.tenant, session_id) in self._sessions:
            raise AlreadyExists(f"session {session_id!r} is open already")
        if len(self._sessions) >= self._max_sessions:
            raise Overloaded(f"{self._max_sessions} sessions are open, the most allowed; close some first")
        limit = min(self.context_length, policy.max_tokens or self.context_length)
        if policy.pinned:
            self.pins.require(limit)
            self.pins.add(limit)
        memory = SessionMemory(self._memory, f"session {session_id}")
        session = Session(session_id, policy, memory, limit, self._clock.now(), system)
        self._sessions[session.key] = session
        self._tenants.setdefault(policy.tenant, Tenant()).add(session)
        self.watch(session)
        return session

    def use(self, tenant: str) -> Tenant:
        """What `tenant` has now; not to be changed."""
        return self._tenants.get(tenant) or Tenant()

    def held(self) -> dict[str, int]:
        """Committed tokens by tenant."""
        return {name: tenant.tokens for name, tenant in self._tenants.items()}

    def listed(self, tenant: str, after: str, state: StateFilter | None = None) -> Iterator[Session]:
        """A tenant's sessions after id `after`, by id, hidden and ephemeral ones excluded; in `state` if that is given.
        It passes over no sessions but those with submitted turns. Nothing must change meanwhile."""
        for session_id in self.use(tenant).listed(after, state):
            self.visited += 1
            session = self._sessions[tenant, session_id]
            if state in (None, session.state.value, session.turn_state):
                yield session

    def leaving(self, tenant: str, most: int, spared: str | None) -> tuple[list[Session], int]:
        """Which sessions of a tenant, of those without an open turn, would have to leave the device for its sessions to
        keep fewer than `most` units there: those used longest ago, and never `spared`; and how many units they would
        keep then. If that cannot be, none would leave, and they would keep all that cannot yield."""
        use, stays = self.use(tenant), self.find(spared, tenant) if spared is not None else None
        kept, leaving = use.units - use.resting_units + use.resting_units_of(stays), list[Session]()
        if kept >= most:
            return leaving, kept
        kept = use.units
        for session in use.resting():
            if kept < most:
                break
            self.visited += 1
            if session is not stays:
                leaving.append(session)
                kept -= session.counted_units
        return leaving, kept

    def units_of(self, session: Session) -> int:
        """Units of all groups that the session's history takes, wherever they are now."""
        computed = max(0, len(session.history) - 1)
        spec = self._memory.spec
        return sum(session_units(group, spec.page_size, computed) for group in spec.groups) if computed else 0

    def note_length(self, session: Session) -> None:
        """The session's history may have another length than before."""
        use = self._tenants[session.policy.tenant]
        use.tokens += len(session.history) - session.counted
        session.counted = len(session.history)
        bytes_now = session.journal_bytes
        use.journal_bytes += bytes_now - session.counted_bytes
        session.counted_bytes = bytes_now

    def note_units(self, session: Session) -> None:
        """The session may keep more or less on the device than before."""
        use = self._tenants.get(session.policy.tenant)
        if use is not None and session.key in self._sessions:
            units = session.memory.kept_units
            use.units += units - session.counted_units
            session.counted_units = units
            use.place(session)

    def note_turn(self, session: Session) -> None:
        """The session has another open turn than before, or its draft has become a submitted turn."""
        self._tenants[session.policy.tenant].place(session)

    def close(self, session: Session, *, keep: bool = False) -> None:
        """Forget it. With `keep` its memory stays, as a prefix of other sequences. It must have no open turn."""
        session.close()
        del self._sessions[session.key]
        if session.policy.pinned:
            self.pins.remove(session.limit)
        if keep:
            self.prefixes[session] = None
        else:
            session.memory.drop()
        self._watched.pop(session.key, None)
        self._forget_dead_expiries()
        name = session.policy.tenant
        self._tenants[name].remove(session)
        if not self._tenants[name].sessions:
            del self._tenants[name]

    def use_prefix(self, session: Session) -> None:
        """A closed session that is kept was of use."""
        if session in self.prefixes:
            del self.prefixes[session]
            self.prefixes[session] = None

    def forget_prefix(self, session: Session) -> bool:
        """Whether this was a closed session; if so, it is no longer kept."""
        if session not in self.prefixes:
            return False
        del self.prefixes[session]
        return True

    def watch(self, session: Session) -> None:
        """The session is idle from `last_turn_end` on: note when it would expire."""
        self.note_turn(session)
        if session.policy.ttl is not None and session.key not in self._watched:
            entry = self._watched[session.key] = next(self._entries)
            part = 1.0 if session.rests else REST_SHARE
            heapq.heappush(self._expiries, (session.last_turn_end + part * session.policy.ttl, entry, session.key))
            self._forget_dead_expiries()

    def age(self, session: Session, idle: float) -> None:
        """A session that was just restored has been idle for so many seconds."""
        if session.policy.ttl is not None:
            idle = min(idle, max(0.0, session.policy.ttl - GRACE_SECONDS))
        session.last_turn_end = self._clock.now() - max(0.0, idle)
        self._watched.pop(session.key, None)
        self.watch(session)

    def take_resting(self) -> list[Session]:
        """Sessions, since the last call, that will expire if they stay idle as long as they were when `expired` found
        them."""
        resting, self._resting = self._resting, []
        return resting

    def _forget_dead_expiries(self) -> None:
        """Keep entries of closed sessions from becoming many more than there are open ones."""
        if len(self._expiries) > 2 * len(self._watched) + 64:
            self._expiries = [entry for entry in self._expiries if self._watched.get(entry[2]) == entry[1]]
            heapq.heapify(self._expiries)

    def expired(self) -> list[Session]:
        """Idle sessions whose TTL has run out, counted from the end of their last turn, up to `MAX_EXPIRED` with those
        that are to leave the device. A session with an open turn never expires; it is watched again when the turn
        ends."""
        now = self._clock.now()
        found: dict[SessionKey, Session] = {}
        while self._expiries and self._expiries[0][0] <= now and len(found) + len(self._resting) < MAX_EXPIRED:
            _, entry, key = heapq.heappop(self._expiries)
            if self._watched.get(key) != entry:
                continue
            del self._watched[key]
            session = self._sessions[key]
            if session.turn is not None or session.state is not SessionState.OPEN:
                continue
            ttl = session.policy.ttl
            if ttl is not None and session.last_turn_end + ttl <= now:
                found[key] = session
                continue
            if ttl is not None and not session.rests and session.last_turn_end + REST_SHARE * ttl <= now:
                session.rests = True
                self._resting.append(session)
            self.watch(session)
        self.more_expired = bool(self._expiries) and self._expiries[0][0] <= now
        return list(found.values())

    def holders(self) -> Iterator[Holder]:
        """Everything that holds leases on account of a session."""
        return all_holders(self.memories())

    def memories(self) -> Iterator[SessionMemory]:
        """Of all sessions, and of those that are closed and kept: those there are now, also when it is read later."""
        sessions = [*self._sessions.values(), *self.prefixes]
        return (session.memory for session in sessions)
