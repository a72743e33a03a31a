"""The registry of open sessions by tenant and id, with the expiry of idle ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain, count
from random import Random

from tenuto.base.checks import check_unicode, wrong
from tenuto.base.clock import Clock
from tenuto.base.errors import AlreadyExists, IllegalTransition, Misdirected, NotFound, Overloaded
from tenuto.base.fleet_views import TenantUse, Uses
from tenuto.base.options import Policy
from tenuto.base.views import SessionKey, SessionState, StateFilter
from tenuto.memory.memory import Memory, session_units
from tenuto.memory.pool import Holder
from tenuto.memory.session_memory import SessionMemory, all_holders
from tenuto.session.pins import Pins
from tenuto.session.session import Session
from tenuto.session.tenants import Tenant
from tenuto.session.traces import Traces
from tenuto.session.turn import Turn

MAX_ID_LENGTH = 128
UNREACHABLE = frozenset({".", ".."})
"""Path segments that clients remove from URLs, so they are not allowed as session ids."""


REST_SHARE = 0.5
"""The part of its TTL after which an idle session should leave the device, if it can be brought back."""
MAX_EXPIRED = 128
"""The most sessions that one call of `expired` finds to expire or leave the device; others follow at the next call."""
LOST = "another replica has the session; ask again"
MAX_LEFT = 10_000
"""The most sessions that are remembered as having left."""
GRACE_SECONDS = 60.0
"""The least time that a restored session stays open, unless its TTL is shorter: clients may be slow to come back."""


class Registry:
    """Opens, finds, expires and closes sessions. The work grows with the sessions concerned, not with all open ones."""

    def __init__(self, memory: Memory, clock: Clock, random: Random, context_length: int, max_sessions: int) -> None:
        self._memory = memory
        self._clock = clock
        self._random = random
        self.context_length = min(context_length, memory.max_length)  # the most tokens that fit a session
        self.pins = Pins(memory, context_length)
        self.max_sessions = max_sessions
        self._sessions: dict[SessionKey, Session] = {}
        self.coming = 0  # sessions of other replicas for which places are kept
        self.prefixes: dict[Session, None] = {}  # closed sessions whose memory is kept, in the order of their last use
        # The known use of tenants with limits elsewhere in the fleet; replaced by `TenantCounts`.
        self.elsewhere: Uses = {}
        self._tenants: dict[str, Tenant] = {}  # by name; only tenants with sessions
        self._expiries: list[tuple[float, int, SessionKey]] = []  # a heap; times are too early if a turn came since
        self._watched: dict[SessionKey, int] = {}  # session -> its live entry
        self._resting: list[Session] = []  # sessions for the next `take_resting`
        self.more_expired = False  # whether more sessions were due than the last `expired` found
        self._entries = count(1)
        self._left: dict[SessionKey, None] = {}  # sessions that another replica continues, in the order of leaving
        self.traces = Traces()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def find(self, session_id: str, tenant: str = "") -> Session | None:
        """Returns the tenant's session with this id, if there is one."""
        return self._sessions.get((tenant, session_id))

    def get(self, session_id: str, tenant: str = "") -> Session:
        """Returns the tenant's session with this id. Raises `NotFound`, or `Misdirected` if another replica continues
        it, or soon may."""
        session = self.find(session_id, tenant)
        if session is None:
            if (tenant, session_id) in self._left:
                raise Misdirected(LOST)
            raise NotFound(f"there is no session {session_id!r}; it was never opened, was closed, or has expired")
        if session.held:
            raise Misdirected(f"session {session_id!r} is moving to another replica; ask again")
        return session

    def turn(self, session_id: str, tenant: str = "") -> Turn:
        """Returns the open turn of a session. Raises `NotFound`, or `IllegalTransition` if no turn is open."""
        turn = self.get(session_id, tenant).turn
        if turn is None:
            raise IllegalTransition(f"session {session_id} has no open turn")
        return turn

    def open(self, session_id: str | None, policy: Policy, system: str | None = None, idle: float = 0.0) -> Session:
        """Opens a new, empty session; `system` is the system message of its conversation. `idle`: for how many seconds
        a restored one has been idle. Raises `AlreadyExists`, `Overloaded` or `InvalidRequest`."""
        if session_id is None:
            session_id = f"{self._random.getrandbits(96):024x}"
        if type(session_id) is not str or not session_id.isprintable() or not 0 < len(session_id) <= MAX_ID_LENGTH:
            raise wrong("session id", session_id, f"1 to {MAX_ID_LENGTH} printable characters")
        if not UNREACHABLE.isdisjoint(session_id.split("/")):
            raise wrong("session id", session_id, "ids without '.' or '..' as a path segment")
        check_unicode("system", system or "")
        for part in chain.from_iterable(policy.metadata):
            check_unicode("metadata", part)
        if (policy.tenant, session_id) in self._sessions:
            raise AlreadyExists(f"session {session_id!r} is open already")
        self._take_place(policy)
        limit = self.limit(policy)
        memory = SessionMemory(self._memory, f"session {session_id}")
        if policy.ttl is not None:
            idle = min(idle, max(0.0, policy.ttl - GRACE_SECONDS))
        session = Session(session_id, policy, memory, limit, self._clock.now() - max(0.0, idle), system)
        self._sessions[session.key] = session
        self.forget_left(session.key)
        if policy.tenant not in self._tenants:
            self._tenants[policy.tenant] = Tenant()
        self._tenants[policy.tenant].add(session)
        self.watch(session)
        return session

    def limit(self, policy: Policy) -> int:
        """Returns the most tokens that a session with this policy may have here."""
        return min(self.context_length, policy.max_tokens or self.context_length)

    def keep_place(self, policy: Policy) -> None:
        """Keeps a place for a session of another replica. Raises `Overloaded`."""
        self._take_place(policy)
        self.coming += 1

    def free_place(self, policy: Policy) -> None:
        """Ends what `keep_place` has begun."""
        if policy.pinned:
            self.pins.remove(self.limit(policy))
        self.coming -= 1

    def _take_place(self, policy: Policy) -> None:
        """Makes sure that one more session may be open, and reserves the units of a pinned one. Raises `Overloaded`."""
        if len(self._sessions) + self.coming >= self.max_sessions:
            raise Overloaded(f"{self.max_sessions} sessions are open, the most allowed; close some first")
        if policy.pinned:
            self.pins.require(self.limit(policy))
            self.pins.add(self.limit(policy))

    def use(self, tenant: str) -> Tenant:
        """Returns the counters and indexes of `tenant`. Read only."""
        return self._tenants.get(tenant) or Tenant()

    def counted(self, tenant: str) -> TenantUse:
        """Returns what the tenant's sessions here count towards its limits. For any thread."""
        use = self.use(tenant)
        return TenantUse(sessions=use.sessions, pinned=use.pinned, tokens=use.tokens, journal_bytes=use.journal_bytes)

    def used(self, tenant: str) -> TenantUse:
        """Returns what the tenant's sessions count in the whole fleet: here, and elsewhere as far as known."""
        elsewhere = self.elsewhere.get(tenant)
        return self.counted(tenant) + elsewhere if elsewhere is not None else self.counted(tenant)

    def counted_of(self, session: Session) -> TenantUse:
        """Returns the part of an open session in its tenant's `counted` use."""
        pinned, size = int(session.policy.pinned), session.counted_bytes
        return TenantUse(sessions=1, pinned=pinned, tokens=session.counted, journal_bytes=size)

    def held(self) -> dict[str, int]:
        """Returns the number of committed tokens by tenant."""
        return {name: tenant.tokens for name, tenant in self._tenants.items()}

    def listed(self, tenant: str, after: str, state: StateFilter | None = None) -> Iterator[Session]:
        """Yields a tenant's sessions after id `after` in the order of ids, without hidden and ephemeral ones; only
        those in `state` if it is given. The only sessions it has to skip have submitted turns in other states. Sessions
        must not change while this is read."""
        for session_id in self.use(tenant).listed(after, state):
            session = self._sessions[tenant, session_id]
            if state in (None, session.state.value, session.turn_state):
                yield session

    def leaving(self, tenant: str, most: int, spared: str | None) -> tuple[list[Session], int]:
        """Returns the sessions of a tenant that have to leave the device so that its sessions keep fewer than `most`
        units there, and the number of units kept then. Only sessions without an open turn leave, least recently used
        first, and never the session with id `spared`. If this cannot be reached, returns no sessions, and the number of
        units that cannot leave."""
        use, stays = self.use(tenant), self.find(spared, tenant) if spared is not None else None
        kept, leaving = use.units - use.resting_units + use.resting_units_of(stays), list[Session]()
        if kept >= most:
            return leaving, kept
        kept = use.units
        for session in use.resting():
            if kept < most:
                break
            if session is not stays:
                leaving.append(session)
                kept -= session.counted_units
        return leaving, kept

    def units_of(self, session: Session) -> int:
        """Returns the units of all groups that the session's history takes, regardless of their tier."""
        computed = max(0, len(session.history) - 1)
        spec = self._memory.spec
        return sum(session_units(group, spec.page_size, computed) for group in spec.groups) if computed else 0

    def note_length(self, session: Session) -> None:
        """Updates the counters after the length of the session's history may have changed."""
        use = self._tenants[session.policy.tenant]
        use.tokens += len(session.history) - session.counted
        session.counted = len(session.history)
        bytes_now = session.journal_bytes
        use.journal_bytes += bytes_now - session.counted_bytes
        session.counted_bytes = bytes_now

    def note_units(self, session: Session) -> None:
        """Updates the counters after the number of units that the session keeps on the device may have changed."""
        use = self._tenants.get(session.policy.tenant)
        if use is not None and session.key in self._sessions:
            units = session.memory.kept_units
            use.units += units - session.counted_units
            session.counted_units = units
            use.place(session)

    def note_turn(self, session: Session) -> None:
        """Updates the indexes after the session's open turn has changed, or its draft has been submitted."""
        self._tenants[session.policy.tenant].place(session)

    def close(self, session: Session, *, keep: bool = False) -> None:
        """Closes and removes a session without an open turn. With `keep` its memory stays, to be shared as a prefix."""
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

    def note_left(self, session: Session) -> None:
        """Remembers that another replica continues a closed session."""
        self.traces.add(session.key)
        self._left[session.key] = None
        if len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]

    def forget_left(self, key: SessionKey) -> None:
        """Forgets that a session has left: it is back, or it is closed."""
        self._left.pop(key, None)

    def use_prefix(self, session: Session) -> None:
        """Marks a kept closed session as the most recently used."""
        if session in self.prefixes:
            del self.prefixes[session]
            self.prefixes[session] = None

    def forget_prefix(self, session: Session) -> bool:
        """Removes a kept closed session. Returns False if the session is not one."""
        if session not in self.prefixes:
            return False
        del self.prefixes[session]
        return True

    def watch(self, session: Session) -> None:
        """Watches the expiry of a session that is idle from `last_turn_end` on."""
        self.note_turn(session)
        if session.policy.ttl is not None and session.key not in self._watched:
            entry = self._watched[session.key] = next(self._entries)
            part = 1.0 if session.rests else REST_SHARE
            heapq.heappush(self._expiries, (session.last_turn_end + part * session.policy.ttl, entry, session.key))
            self._forget_dead_expiries()

    def take_resting(self) -> list[Session]:
        """Returns the sessions that `expired` has found, since the last call, to have been idle for `REST_SHARE` of
        their TTL, and that should leave the device."""
        resting, self._resting = self._resting, []
        return resting

    def _forget_dead_expiries(self) -> None:
        """Removes entries of closed sessions when they are more than those of open ones."""
        if len(self._expiries) > 2 * len(self._watched) + 64:
            self._expiries = [entry for entry in self._expiries if self._watched.get(entry[2]) == entry[1]]
            heapq.heapify(self._expiries)

    def expired(self) -> list[Session]:
        """Returns idle sessions whose TTL has run out, counted from the end of their last turn. Finds up to
        `MAX_EXPIRED` sessions, including those that should leave the device. A session with an open turn never expires;
        it is watched again when the turn ends."""
        now = self._clock.now()
        found: dict[SessionKey, Session] = {}
        while self._expiries and self._expiries[0][0] <= now and len(found) + len(self._resting) < MAX_EXPIRED:
            _, entry, key = heapq.heappop(self._expiries)
            if self._watched.get(key) != entry:
                continue
            del self._watched[key]
            session = self._sessions[key]
            if session.turn is not None or session.state is not SessionState.OPEN or session.held:
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
        """Yields all holders of leases that belong to open sessions or kept closed ones."""
        return all_holders(self.memories())

    def memories(self) -> Iterator[SessionMemory]:
        """Yields the memory of all open sessions and kept closed ones, as they are at the time of the call."""
        sessions = [*self._sessions.values(), *self.prefixes]
        return (session.memory for session in sessions)
