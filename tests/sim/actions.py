"""A seeded random world: sessions, turns, faults and pressure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tenuto.base.options import MAX_PRIORITY, Policy, Pooling, TurnParams
from tenuto.base.sampling import Sampling
from tenuto.base.turns import TurnState
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.sim.adapters import unload_and_load
from tests.sim.erasing import erase_some
from tests.sim.expecting import expecting
from tests.sim.grammars import GRAMMARS
from tests.sim.letters import VOCAB
from tests.sim.limits import limited
from tests.sim.mirror import MirroredWorld
from tests.sim.naive import PREFILL
from tests.sim.overtaking import overtaking
from tests.sim.replacing import replacing
from tests.sim.setting import WorldConfig
from tests.sim.travels import leave_and_come, park_last


class RandomWorld(MirroredWorld):
    """Random operations between the steps."""

    def __init__(self, config: WorldConfig, ignored: Collection[str] = ()) -> None:
        super().__init__(config, ignored)
        operations = [
            (self.op_open, 6),
            (self.op_submit, 24),
            (self.op_append, 5),
            (self.op_adopt, 3),
            (self.op_draft, 22),
            (self.op_submit_draft, 6),
            (self.op_regenerate, 15),
            (self.op_abort, 20),
            (self.op_fork, 10),
            (self.op_rewind, 7),
            (self.op_close, 5),
            (self.op_drop, 18),
            (self.op_preempt, 36),
            (self.op_deadline, 11),
            (self.op_one_shot, 4),
            (self.op_illegal, 3),
        ]
        if config.prefixes:
            operations.append((self.op_repeat, 60))
        if config.overtaking:
            operations += [(each, 50) for each in overtaking(self)]
        if config.replacing:
            operations += [(each, 40) for each in replacing(self)]
        if config.expects:
            operations += expecting(self)
        if config.adapters:
            operations.append((partial(unload_and_load, self), 15))
        rare = (
            (config.trains, partial(self.training.update, self), 15),
            (config.erases, partial(erase_some, self), 25),
            (config.pins, self.op_pin, 20),
        )
        operations += [(operation, number) for wanted, operation, number in rare if wanted]
        if config.tiers:
            operations += [
                (self.op_park, 60),
                (self.op_come_back, 30),
                (self.op_come_back_together, 10),
                (self.op_restart, 5),
            ]
            if config.overtaking:
                operations += [(partial(leave_and_come, self), 20), (partial(park_last, self), 20)]
        if config.seed % 2:  # a calm world: no operation takes memory away
            operations = [(op, n) for op, n in operations if op not in (self.op_drop, self.op_preempt)]
        self._names = [operation for operation, _ in operations]
        self._weights = [weight for _, weight in operations]

    def run(self, steps: int) -> None:
        """Runs `steps` engine steps with random operations between them."""
        last = self.steps + steps
        while self.steps < last:
            for _ in range(self.rng.choice((0, 1, 1, 2, 3))):
                self.rng.choices(self._names, self._weights)[0]()
            if self.rng.random() < 0.3:
                self.clock.advance(self.rng.random())
            self.step()

    # -- choices

    def _sessions(self) -> Iterator[Session]:
        return (s for s in self.engine.registry if not self.naive[s.id].closing)

    def _pick(self, want: Callable[[Session], object]) -> str | None:
        found = [s.id for s in self._sessions() if want(s)]
        return self.rng.choice(found) if found else None

    def _idle(self) -> str | None:
        return self._pick(lambda s: s.turn is None)

    def _tokens(self) -> list[int]:
        rng, most = self.rng, self.config.context
        count = rng.choice((0, 1, 1, 2, 3, 5, 8, 13, 21, 34))
        if rng.random() < 0.04:
            count = rng.randint(most // 2, most + 1)
        count = min(count, most + 1)
        if self.config.prefixes and rng.random() < 0.7:  # a prefix of one of three long texts, then random tokens
            common = rng.randint(0, count)
            text = rng.randrange(3)
            return [(i * i + text) % VOCAB for i in range(common)] + [
                rng.randrange(VOCAB) for _ in range(count - common)
            ]
        return [rng.randrange(VOCAB) for _ in range(count)]

    def _priority(self, *usual: int | None) -> int | None:
        rng = self.rng
        if self.config.seed % 5 == 2 and rng.random() < 0.2:
            return rng.choice((-MAX_PRIORITY, MAX_PRIORITY, rng.randint(-9, 9)))
        return rng.choice(usual)

    def _params(self, *, draft: bool = False) -> TurnParams:
        rng = self.rng
        most = rng.choice((None, None, 0, 1, 2, 5, 9, 20))
        least = rng.choice((0, 0, 0, 1, 4)) if most is None else rng.choice((0, 0, 0, most, most // 2))
        stop: tuple[str, ...] = ()
        if self.config.text and rng.random() < 0.5:
            stop = tuple(rng.sample(("ab", "bb", "abca", "aé", "c", "bé", "ccc", "ca", "€"), rng.choice((1, 2, 3))))
        scored = None if draft or rng.random() < 0.65 else rng.choice((0, 2))
        scored = None if self.config.trains else scored  # which weights score it would have to be known
        params = TurnParams(
            max_new_tokens=most,
            sampling=Sampling(temperature=1.0, seed=rng.choice((0, rng.getrandbits(40), rng.getrandbits(40)))),
            stop_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 1, 3)))),
            stop=stop,
            ignore_eos=rng.random() < 0.3,
            priority=self._priority(None, None, None, 1, 2),
            queue_timeout=rng.choice((None, None, 3.0)),
            timeout=rng.choice((None, 6.0, 12.0)),
            min_new_tokens=least,
            logprobs=None if rng.random() < 0.8 else rng.choice((0, 1, 3)),
            input_logprobs=scored,
            grammar=rng.choice(GRAMMARS) if self.config.grammars and rng.random() < 0.7 else None,
            speculate=not self.config.headed or rng.random() < 0.8,
        )
        return limited(self.limiting, params) if self.config.limits else params

    def _pooled(self, tokens: Sequence[int], params: TurnParams) -> TurnParams:
        return params if self.config.trains else pooled(tokens, params)

    # -- operations

    def op_open(self) -> None:
        if len(self.naive) >= self.config.sessions and self.rng.random() < 0.9:
            return
        self.open(
            Policy(
                priority=self._priority(0, 0, 0, 1) or 0,
                ttl=self.rng.choice((None, 15.0, 30.0)),
                max_tokens=self.rng.choice((None, None, None, max(1, self.config.context // 2))),
                tenant=self.rng.choice(("", "", "ann")),
            )
        )

    def op_pin(self) -> None:
        """Opens a pinned session, if there is room, and uses it at once; a few stay open."""
        pinned = [s.id for s in self._sessions() if s.policy.pinned]
        if len(pinned) > 3 and self.rng.random() < 0.8:
            self.close(self.rng.choice(pinned), finish=True)
            return
        most = self.rng.choice((None, self.config.context // 2, self.config.context // 4))
        sid = self.open(Policy(pinned=True, max_tokens=max(1, most) if most is not None else None))
        if sid is not None:
            self.submit(sid, self._tokens(), self._params())

    def op_submit(self) -> None:
        sid = self._idle()
        if sid is not None:
            tokens = self._tokens()
            self.submit(sid, tokens, self._pooled(tokens, self._params()))

    def op_one_shot(self) -> None:
        """Sends a one-shot request: an ephemeral session that closes when its only turn ends."""
        sid = self.open(Policy(ephemeral=True))
        if sid is not None:
            if self.rng.random() < 0.2:
                self.adopt(sid, self._tokens(), [])
            tokens = self._tokens() or [1]
            self.submit(sid, tokens, self._pooled(tokens, self._params()))
            if self.rng.random() < 0.3:
                self.fork(sid)

    def op_repeat(self) -> None:
        """Repeats an earlier request exactly or nearly: a retry, a sample, a shared prompt, a resent history."""
        sid = self._pick(lambda s: bool(s.history) or s.turn is not None)
        if sid is None:
            return
        session = self.session_of(sid)
        tokens = list(session.history)
        if session.turn is not None and not session.turn.drafting:
            tokens = list(session.turn.tokens(0, session.turn.prompt_length))
        if self.rng.random() < 0.5:
            tokens = tokens[: self.rng.randint(0, len(tokens))] + self._tokens()[:8]
        child = self.open(Policy(ephemeral=self.rng.random() < 0.8, **self.own(sid)))
        if child is not None:
            params = self._params(draft=True)
            if self.rng.random() < 0.1:
                self.append(child, tokens)
            else:
                self.submit(child, tokens or [1], params)

    def op_append(self) -> None:
        sid = self._idle()
        if sid is not None:
            self.append(sid, self._tokens())

    def op_adopt(self) -> None:
        sid = self._idle()
        if sid is not None:
            self.adopt(sid, self._tokens(), self._tokens()[:5])

    def op_draft(self) -> None:
        again = self.rng.random() < 0.5
        drafting = lambda turn: turn is not None and turn.state is TurnState.DRAFTING  # noqa: E731
        sid = self._pick(lambda s: drafting(s.turn) or (s.turn is None and not again))
        if sid is None:
            return
        turn = self.session_of(sid).turn
        if turn is None:
            tokens = self._tokens()
        else:  # extended, corrected near the end, or rewritten
            old = list(turn.input)
            tokens = old[: max(0, len(old) - self.rng.choice((0, 1, 3, 7, 13, 99)))] + self._tokens()[:21]
        self.draft(sid, tokens)

    def op_submit_draft(self) -> None:
        sid = self._pick(lambda s: s.turn is not None and s.turn.state is TurnState.DRAFTING)
        if sid is None:
            return
        turn = self.session_of(sid).turn
        assert turn is not None
        tokens = list(turn.input) if self.rng.random() < 0.7 else list(turn.input)[:-1] + self._tokens()[:5]
        if self.rng.random() < 0.1:
            self.append(sid, tokens)
        else:
            self.submit(sid, tokens, self._params(draft=self.rng.random() < 0.9))

    def op_regenerate(self) -> None:
        sid = self._pick(lambda s: s.turn is None and bool(s.records))
        if sid is not None:
            self.regenerate(sid, self._params(draft=self.rng.random() < 0.9))

    def op_abort(self) -> None:
        wanted = self.rng.choice((None, None, *(state for state in TurnState if not state.ended)))
        sid = self._pick(lambda s: s.turn is not None and wanted in (None, s.turn.state))
        if sid is not None:
            self._abort(sid)

    def _abort(self, sid: str) -> None:
        self.abort(sid, self.rng.choice((None, None, "delivered", "delivered", 0, 1, 3)))

    def op_preempt(self) -> None:
        """Preempts a running turn, then does something to it before it can resume."""
        kept = self.rng.random() < 0.7
        sid = self._pick(lambda s: s.has_running_turn and s.turn.replaces and len(s.turn.output) > 1)  # type: ignore[union-attr]
        again = sid is not None and self.rng.random() < 0.7
        if not again:
            sid = self._pick(lambda s: s.has_running_turn and (not kept or s.memory.computed > 0))
        if sid is None:
            return
        turn = self.session_of(sid).turn
        assert turn is not None
        self.engine.pressure.preempt(turn)
        self.turns[turn.number].disturbed = True
        what = self.rng.random()
        if again and what < 0.6:  # barge-in while the old output is in memory
            self.abort(sid, self.rng.choice((1, 2, 5)))
            return
        if kept and what < 0.8:
            self.engine.sessions.drop(sid, **self.own(sid))
        elif what < 0.45:
            self._abort(sid)
        elif what < 0.9:
            self._jump_to_deadline(turn)

    def op_deadline(self) -> None:
        """Moves the clock past the deadline of some open turn."""
        state = self.rng.choice((TurnState.DRAFTING, TurnState.QUEUED, TurnState.QUEUED, TurnState.RUNNING))
        found = [s.turn for s in self._sessions() if s.turn is not None and s.turn.state is state]
        if found:
            self._jump_to_deadline(self.rng.choice(found))
        elif self.rng.random() < 0.1:
            self.clock.advance(50.0)

    def _jump_to_deadline(self, turn: Turn) -> None:
        when = self.turns[turn.number].deadline(self.engine.config.draft_timeout)
        if when is not None:
            self.clock.advance(max(0.0, when - self.clock.now() - self.rng.choice((0.0, 0.0, 0.001))))

    def op_fork(self) -> None:
        running = self.rng.random() < 0.5
        sid = self._pick(lambda s: s.has_running_turn or not running)
        if sid is None:
            return
        naive, how = self.naive[sid], self.rng.random()
        if how < 0.5:
            self.fork(sid)
        elif how < 0.8:
            self.fork(sid, turn=self.rng.randint(0, len(naive.records)))
        else:
            self.fork(sid, position=self.rng.randint(0, len(naive.tokens)))

    def op_rewind(self) -> None:
        sid = self._idle()
        if sid is None:
            return
        naive = self.naive[sid]
        if self.rng.random() < 0.5:
            self.rewind(sid, turn=self.rng.randint(0, len(naive.records)))
        else:
            self.rewind(sid, position=self.rng.randint(0, len(naive.tokens)))

    def op_close(self) -> None:
        busy = self.rng.random() < 0.5
        sid = self._pick(lambda s: s.turn is not None or not busy)
        if sid is not None:
            self.close(sid, finish=self.rng.random() < 0.7)

    def op_drop(self) -> None:
        state = self.rng.choice((None, TurnState.QUEUED, TurnState.QUEUED, TurnState.QUEUED))
        wanted = lambda turn: turn is None if state is None else turn is not None and turn.state is state  # noqa: E731
        sid = self._pick(lambda s: wanted(s.turn) and s.memory.computed > 0)
        if sid is None and state is not None:  # open one that waits
            sid = self._pick(lambda s: s.turn is None and s.memory.computed > 0)
            if sid is not None:
                self.submit(sid, self._tokens(), self._params())
        if self.rng.random() < 0.1:
            self.engine.sessions.drop()
        elif sid is not None and not self.session_of(sid).has_running_turn:
            session = self.session_of(sid)
            drafted = session.turn is not None and session.memory.turn is not None
            self.engine.sessions.drop(sid, **self.own(sid))
            if not drafted and session.memory.computed:
                self.found("drop", f"{sid} was dropped and holds memory")

    def op_park(self) -> None:
        """Puts a session that has no turn in memory under pressure, so that it yields."""
        sid = self._pick(lambda s: s.memory.turn is None and s.memory.computed > 0 and not s.policy.pinned)
        if sid is not None:
            self.engine.pressure.drop(self.session_of(sid), "pressure")

    def op_come_back(self) -> None:
        """Continues a session that has lost its memory."""
        sid = self._pick(lambda s: s.turn is None and len(s.history) > 1 and s.memory.computed == 0)
        if sid is not None:
            self.submit(sid, self._tokens(), self._params(draft=True))

    def op_come_back_together(self) -> None:
        """Continues a session that has lost its memory, and a fork of it at the same time."""
        sid = self._pick(lambda s: s.turn is None and len(s.history) > 1 and s.memory.computed == 0)
        if sid is not None and (child := self.fork(sid)) is not None:
            for each in (sid, child):
                self.submit(each, self._tokens(), self._params(draft=True))

    def op_restart(self) -> None:
        """Ends the engine, cleanly or not, and continues its sessions in another one."""
        self.restart(killed=self.rng.random() < 0.3)

    def op_illegal(self) -> None:
        """Tries an operation that the state does not allow: it must raise a typed error and change nothing."""
        rng = self.rng
        some = self._pick(lambda s: True)
        if some is None:
            return
        turn = self.session_of(some).turn
        naive = self.naive[some]
        calls: list[Callable[[], object]] = [
            lambda: self.submit(some, [1], TurnParams(priority=3)),
            lambda: self.rewind(some, turn=0),
            lambda: self.regenerate(some, TurnParams(max_new_tokens=0)),
            lambda: self.draft(some, [VOCAB]),
            lambda: self.append(some, [1, -1]),
            lambda: self.adopt(some, [1], [VOCAB]),
            lambda: self.open(Policy(**self.own(some)), some),
            lambda: self.submit(some, [1] * (self.config.context + 1), TurnParams()),
            lambda: self.submit(some, [1], TurnParams(stop_ids=(VOCAB,))),
            lambda: self.rewind(some, position=10**6),
            lambda: self.rewind(some),
            lambda: self.fork(some, turn=10**6),
            lambda: self.fork(some, turn=0, position=0),
            lambda: self.abort(some, -2) if turn is None or naive.turn is not None else None,
        ]
        if turn is None:
            calls += [lambda: self.abort(some, None), lambda: self._raising(some), lambda: self._raising(some)]
        rng.choice(calls)()

    def _raising(self, sid: str) -> None:
        """Yields tokens, then raises an error of the caller's."""

        def tokens() -> Iterator[int]:
            yield 1
            raise RuntimeError("the caller's own error")

        def append(sid: str, tokens: Iterator[int], **own: Any) -> object:
            return self.engine.turns.submit(sid, tokens, PREFILL, **own)

        operation: Callable[..., object] = self.rng.choice((self.engine.turns.submit, append, self.engine.turns.draft))
        session = self.session_of(sid)
        before = self._shape(session)
        try:
            operation(sid, tokens(), **self.own(sid))
        except Exception:  # noqa: BLE001 - whatever it is, the engine must not have stopped or changed
            if self.engine.fuse.broken is not None:
                self.engine.fuse.broken = None
                self.found("broken", f"an iterator that raises stopped the engine in {operation.__name__}")
            if self._shape(session) != before:
                self.found("refusals", f"{operation.__name__}: refused and changed something")
        else:
            self.found("refusals", f"{operation.__name__} accepted tokens from an iterator that raises")


def pooled(tokens: Sequence[int], params: TurnParams) -> TurnParams:
    """Asks for a vector in some of the turns that can have one. Draws nothing, since what is drawn later would change,
    and with it the seeds that catch faults."""
    poolings: dict[int, Pooling] = {0: "last", 1: "mean", 2: "first", 3: "last"}
    able = tokens and params.max_new_tokens != 0
    return replace(params, pooling=poolings.get(params.sampling.seed % 8)) if able else params
