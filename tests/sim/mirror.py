"""Every engine operation, mirrored in the naive model: the engine must refuse it exactly when the model does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from tenuto.base.errors import TenutoError
from tenuto.base.groups import Kind
from tenuto.base.options import Policy, TurnParams
from tenuto.base.turns import Keep, TurnState
from tenuto.memory.memory import session_units, turn_units
from tenuto.session.records import SavedSession
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.sim import adapters, internals
from tests.sim.grammars import constraint_of
from tests.sim.letters import VOCAB
from tests.sim.naive import PREFILL, NaiveSession, NaiveTurn
from tests.sim.world import World

T = TypeVar("T")
Codes = set[str]


class MirroredWorld(World):
    """The operations. Each returns the engine's result, or `None` if the engine rightly refused."""

    def attempt(self, what: str, reasons: Codes, call: Callable[[], T], sid: str | None = None) -> T | None:
        """Runs `call`, which must be refused for one of `reasons`, or accepted if there are no reasons."""
        session = self.session_of(sid) if sid is not None and self.is_open(sid) else None
        before = self._shape(session)
        try:
            result = call()
        except TenutoError as error:
            self.stats[f"refused {error.code}"] += 1
            if error.code not in reasons:
                self.found("refusals", f"{what}: refused with {error.code}, {error}; expected {reasons or 'nothing'}")
            if self._shape(session) != before:
                self.found("refusals", f"{what}: refused and changed something")
            return None
        if reasons:
            self.found("refusals", f"{what} was accepted; expected {reasons}")
        return result

    @staticmethod
    def _shape(session: Session | None) -> object:
        if session is None:
            return None
        turn = session.turn
        return (
            session.memory.computed,
            session.version,
            turn,
            turn is not None and (turn.state, turn.input, turn.params, turn.arrival, turn.changed),
            session.state,
        )

    # -- sessions

    def open(self, policy: Policy, sid: str | None = None) -> str | None:
        reasons: Codes = set()
        if self.config.adapters:
            policy = adapters.chosen(self, policy)
        if sid is not None and sid in self.naive:
            reasons.add("already_exists")
        if len(self.naive) >= self.config.sessions:
            reasons.add("overloaded")
        if policy.pinned and not self._may_pin(policy):
            reasons.add("overloaded")
        session = self.attempt("open", reasons, lambda: self.engine.sessions.open(sid, policy))
        if session is None:
            return None
        self.tenants[session.id] = policy.tenant
        policy = adapters.resolved(self, policy)
        if session.policy != policy:
            self.found("history", f"{session!r} was opened with {session.policy}, not {policy}")
        self.naive[session.id] = NaiveSession(policy, self._limit(policy), self.clock.now())
        self._check_limit(session)
        return session.id

    def _may_pin(self, policy: Policy) -> bool:
        """Returns whether the longest turn still fits beside all pinned sessions at their full length."""
        config, shape = self.config, self.engine.memory.shape
        limits = [naive.limit for naive in self.naive.values() if naive.policy.pinned] + [self._limit(policy)]
        for group, units in zip(config.groups, config.units, strict=True):
            pinned = sum(session_units(group, config.page_size, limit) for limit in limits)
            if pinned + turn_units(group, config.page_size, shape, self.longest, generates=True) > units:
                return False
        return True

    def _limit(self, policy: Policy) -> int:
        return min(self.longest, policy.max_tokens or self.longest)

    def _check_limit(self, session: Session) -> None:
        if session.limit != self.naive[session.id].limit:
            self.found("limits", f"{session!r} has limit {session.limit}, not {self.naive[session.id].limit}")

    def fork(self, sid: str, *, turn: int | None = None, position: int | None = None) -> str | None:
        naive, session = self.naive[sid], self.session_of(sid)
        reasons: Codes = {"session_closed"} if naive.closing else set()
        if len(self.naive) >= self.config.sessions:
            reasons.add("overloaded")
        if (turn is not None and turn > len(naive.records)) or (position or 0) > len(naive.tokens):
            reasons.add("invalid_request")
        if turn is not None and position is not None:
            reasons.add("invalid_request")
        held = internals.positions_kept(session)
        child = self.attempt(
            "fork", reasons, lambda: self.engine.sessions.fork(sid, turn=turn, position=position, **self.own(sid)), sid
        )
        if child is None or reasons:
            return None
        at = len(naive.tokens) if position is None else position
        if turn is not None:
            at = naive.records[turn - 1][2] if turn else 0
        policy = replace(naive.policy, ephemeral=False, pinned=False)
        self.tenants[child.id] = policy.tenant
        self.naive[child.id] = naive.fork(at, policy, self._limit(policy), self.clock.now())
        self._check_limit(child)
        if child.history != self.naive[child.id].tokens:
            self.found("history", f"a fork at {at} of {sid} differs")
        if child.policy != policy:
            self.found("history", f"a fork has {child.policy}, not {policy}")
        self._check_fork(session, child, at, held)
        return child.id

    def _check_fork(self, session: Session, child: Session, at: int, held: list[int]) -> None:
        reached = child.memory.computed
        found = session.memory.computed > max(0, len(session.history) - 1)  # elsewhere, for the waiting turn's input
        if self._full_only or (at >= len(session.history) and not found):
            wanted = min(session.memory.computed, max(0, at - 1)) if not session.memory.arriving else 0
            if reached != wanted:
                self.found("shared", f"a fork at {at} shares {reached} tokens of {session.memory.computed}")
        parked = internals.is_parked(self.engine, session)  # or discarded for room while it is read
        if (
            parked
            and session.memory.arriving
            and at >= len(session.history)
            and not internals.is_parked(self.engine, child)
        ):
            self.found("shared", f"a fork at {at} of a session whose memory is arriving is not parked")
        mine, its = [p for p in held if p < reached], internals.positions_kept(child)[:-1]
        if its != mine:
            self.found("shared", f"a fork has checkpoints at {its}, its parent below at {mine}")

    def imported(self, sid: str, saved: SavedSession) -> None:
        """Notes that an exported session was imported as a new session."""
        session = self.attempt("import", set(), lambda: self.engine.sessions.restore(saved))
        if session is not None:
            naive = self.naive[sid]
            self.tenants[session.id] = saved.policy.tenant
            limit = self._limit(saved.policy)
            self.naive[session.id] = naive.fork(len(naive.tokens), saved.policy, limit, self.clock.now())
            self.naive[session.id].version, self.naive[session.id].had = session.version, {}
            if session.history != naive.tokens:
                self.found("history", f"{sid} differs when it is imported")

    @property
    def _full_only(self) -> bool:
        return all(group.kind is Kind.FULL for group in self.config.groups)

    def rewind(self, sid: str, *, turn: int | None = None, position: int | None = None) -> None:
        naive, session = self.naive[sid], self.session_of(sid)
        reasons = self._busy(naive)
        if turn is None and position is None:
            reasons.add("invalid_request")
        if (turn is not None and turn > len(naive.records)) or (position or 0) > len(naive.tokens):
            reasons.add("invalid_request")
        computed, held = session.memory.computed, internals.positions_kept(session)
        if (
            self.attempt(
                "rewind",
                reasons,
                lambda: self.engine.sessions.rewind(sid, turn=turn, position=position, **self.own(sid)),
                sid,
            )
            is None
        ):
            return
        at = (naive.records[turn - 1][2] if turn else 0) if turn is not None else position or 0
        naive.cut(at)
        if session.history != naive.tokens:
            self.found("history", f"{sid} rewound to {at} differs")
        self._check_cut(session, computed, held, max(0, at - 1), "a rewind")

    def _check_cut(self, session: Session, computed: int, held: list[int], target: int, what: str) -> None:
        """Checks that a session cut to `target` keeps all it can."""
        reached, least = session.memory.computed, min(computed, target)
        if not self._full_only:
            least = max((p for p in held if p <= target), default=0)
        if not least <= reached <= min(computed, target) and not self.watch.yielded(session):
            self.found("kept memory", f"{what} to {target} left {reached} of {computed} tokens, checkpoints at {held}")

    def adopt(self, sid: str, tokens: Sequence[int], output: Sequence[int]) -> None:
        naive = self.naive[sid]
        reasons = self._busy(naive) | self._bad(tokens) | self._bad(output)
        if len(naive.tokens) + len(tokens) + len(output) > naive.limit:
            reasons.add("context_exceeded")
        if (
            self.attempt(
                "adopt", reasons, lambda: self.engine.sessions.adopt(sid, tokens, output, **self.own(sid)), sid
            )
            is not None
        ):
            naive.adopt(tokens, output, self.clock.now())

    def close(self, sid: str, *, finish: bool) -> None:
        naive, session = self.naive[sid], self.session_of(sid)
        turn = session.turn
        finishes = finish and turn is not None and turn.state is not TurnState.DRAFTING
        if turn is not None and not finishes:
            self.asked[turn.number] = None
        naive.closing = turn is not None
        self.attempt("close", set(), lambda: self.engine.sessions.close(sid, finish=finish, **self.own(sid)), sid)
        if finishes:
            return
        if turn is not None:
            self.ended(turn)
        self.naive.pop(sid, None)
        if self.is_open(sid):
            self.found("ends", f"{sid} is still open after being closed")

    # -- turns

    @staticmethod
    def _busy(naive: NaiveSession) -> Codes:
        return ({"session_closed"} if naive.closing else set()) | (
            {"session_busy"} if naive.turn is not None else set()
        )

    @staticmethod
    def _bad(tokens: Sequence[int]) -> Codes:
        return {"invalid_request"} if any(not 0 <= token < VOCAB for token in tokens) else set()

    def _room(self, naive: NaiveSession, base: int, tokens: Sequence[int], wanted: int | None) -> Codes:
        reasons, prompt = self._bad(tokens), base + len(tokens)
        if wanted != 0 and prompt == 0:
            reasons.add("invalid_request")
        elif naive.limit - prompt < (0 if wanted == 0 else 1):
            reasons.add("context_exceeded")
        return reasons

    def _admitted(self, params: TurnParams) -> Codes:
        reasons = {"overloaded"} if len(self.waiting()) >= self.config.queued else set()
        if (params.stop and not self.config.text) or any(not 0 <= token < VOCAB for token in params.stop_ids):
            reasons.add("invalid_request")
        return reasons

    def submit(self, sid: str, tokens: Iterable[int], params: TurnParams) -> Turn | None:
        naive, given = self.naive[sid], list(tokens)
        draft = naive.turn if naive.turn is not None and naive.turn.drafting else None
        reasons = self._room(naive, len(naive.tokens), given, params.max_new_tokens) | self._admitted(params)
        if draft is None:
            reasons |= self._busy(naive)
        elif params.input_logprobs is not None or params.pooling is not None:
            reasons.add("invalid_request")
        if params.pooling is not None and not given:
            reasons.add("invalid_request")
        turn = self.attempt(
            "submit",
            reasons,
            lambda: self.engine.turns.submit(sid, given, params, constraint=constraint_of(params), **self.own(sid)),
            sid,
        )
        return self._opened(turn, sid, len(naive.tokens), given, params, params.max_new_tokens)

    def append(self, sid: str, tokens: Sequence[int]) -> Turn | None:
        naive = self.naive[sid]
        draft = naive.turn is not None and naive.turn.drafting
        reasons = self._room(naive, len(naive.tokens), tokens, 0) | self._admitted(PREFILL)
        if not draft:
            reasons |= self._busy(naive)
        turn = self.attempt(
            "append", reasons, lambda: self.engine.turns.submit(sid, tokens, PREFILL, **self.own(sid)), sid
        )
        return self._opened(turn, sid, len(naive.tokens), tokens, PREFILL, 0)

    def regenerate(self, sid: str, params: TurnParams) -> Turn | None:
        naive = self.naive[sid]
        reasons = self._busy(naive) | self._admitted(params)
        if not naive.records or naive.records[-1][1] == naive.records[-1][2]:
            reasons.add("illegal_transition")
            base = 0
        else:
            base = naive.records[-1][1]
            reasons |= self._room(naive, base, (), params.max_new_tokens)
        if params.max_new_tokens == 0 or params.input_logprobs is not None or params.pooling is not None:
            reasons.add("invalid_request")
        turn = self.attempt(
            "regenerate",
            reasons,
            lambda: self.engine.turns.regenerate(sid, params, constraint_of(params), **self.own(sid)),
            sid,
        )
        turn = self._opened(turn, sid, base, (), params, params.max_new_tokens)
        if turn is not None:
            self.turns[turn.number].replaces = True
        return turn

    def _opened(
        self, turn: Turn | None, sid: str, base: int, tokens: Sequence[int], params: TurnParams, wanted: int | None
    ) -> Turn | None:
        if turn is None:
            return None
        naive = self.naive[sid]
        known = naive.turn
        if known is None:
            known = NaiveTurn(turn.number, sid, naive, base, tokens)
            self.turns[turn.number] = naive.turn = known
        else:
            known.redraft(tokens, self.clock.now())
            known.was_draft = True
        room = naive.limit - base - len(tokens)
        most = room if wanted is None else min(wanted, room)
        known.submit(params, most, self.clock.now(), self.steps, text=self.config.text)
        if turn.max_new_tokens != most:
            self.found("limits", f"{turn!r} may generate {turn.max_new_tokens} tokens, not {most}")
        return turn

    def draft(self, sid: str, tokens: Sequence[int]) -> Turn | None:
        naive = self.naive[sid]
        reasons = self._room(naive, len(naive.tokens), tokens, 0)
        if naive.turn is None or not naive.turn.drafting:
            reasons |= self._busy(naive)
        turn = self.attempt("draft", reasons, lambda: self.engine.turns.draft(sid, tokens, **self.own(sid)), sid)
        if turn is None:
            return None
        if naive.turn is None:
            known = NaiveTurn(turn.number, sid, naive, len(naive.tokens), tokens)
            known.drafting, known.changed = True, self.clock.now()
            self.turns[turn.number] = naive.turn = known
        else:
            naive.turn.redraft(tokens, self.clock.now())
        return turn

    def abort(self, sid: str, keep: Keep) -> None:  # noqa: C901, PLR0912 - one rule after the other
        naive, session = self.naive[sid], self.session_of(sid)
        turn, memory = session.turn, session.memory
        reasons = {"illegal_transition"} if turn is None else set()
        if isinstance(keep, int) and keep < 0:
            reasons.add("invalid_request")
        before, held = memory.computed, internals.positions_kept(session)
        memory_of_turn, reached = memory.turn is not None, memory.turn.computed if memory.turn is not None else 0
        own = [*internals.spaced_checkpoints(session), memory.turn.start if memory.turn is not None else 0]
        arriving, parked = memory.arriving, internals.is_parked(self.engine, session)
        if turn is not None and not reasons:
            self.asked[turn.number] = keep
        if (
            self.attempt("abort", reasons, lambda: self.engine.turns.abort(sid, keep, **self.own(sid)), sid) is None
            or turn is None
        ):
            return
        base = naive.turn.base if naive.turn is not None else 0
        valid = base if turn.replaces else turn.prompt_length
        self.ended(turn)
        if not self.is_open(session.id):
            return
        kept, committed = memory.computed, turn.result is not None and turn.result.committed
        last = max(0, len(session.history) - 1)
        if arriving:
            if kept or (not committed and internals.is_parked(self.engine, session) != parked):
                self.found("kept memory", f"the end of a turn whose memory was arriving left {kept} tokens of it")
        elif not committed:
            if before > last:  # more of the input was found elsewhere
                self._check_cut(session, before, held, last, "an abort")
            elif kept != before:
                self.found("kept memory", f"an abort left {kept} of {before} tokens in memory")
        elif memory_of_turn:
            least = min(last, max(reached, min(base, before)))
            if not self._full_only:
                kept_before = [p for p in held if p <= min(base, last)]
                least = max([p for p in own if p <= min(last, reached)] + kept_before, default=0)
            if kept < least:
                self.found("kept memory", f"a barge-in left {kept} tokens, {reached} computed, checkpoints at {own}")
        else:
            self._check_cut(session, before, held, min(valid, last), "a barge-in without memory")
