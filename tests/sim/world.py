"""A seeded random world: sessions, turns, faults and pressure on the witness, checked against the naive model.

A failing seed is a bug report: `python -m tests.sim --seed N` runs it again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random

from tenuto.base.clock import ManualClock
from tenuto.base.errors import TenutoError
from tenuto.base.groups import Kind
from tenuto.engine.engine import DELIVERED, Engine
from tenuto.exec.witness import WitnessExecutor
from tenuto.memory.checkpoint import Checkpoint
from tenuto.memory.full import FullTable
from tenuto.memory.paged import pages_for
from tenuto.memory.session_memory import SessionMemory
from tenuto.memory.sliding import SlidingTable
from tenuto.memory.state import StateTable
from tenuto.session.session import Policy
from tenuto.session.turn import EndReason, Turn, TurnParams, TurnState
from tests.sim.naive import NaiveSession, NaiveTurn
from tests.sim.setting import WorldConfig, engine_config, spec_of

VOCAB = 13
STUCK_STEPS = 400  # steps without any token computed while a submitted turn is open
PATIENCE = 6000  # steps a submitted turn may take from its opening to its end


class World:
    """Drives one engine at random and checks everything it does."""

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        self.rng = Random(config.seed * 7919 + 1)
        self.clock = ManualClock()
        self.naive: dict[str, NaiveSession] = {}
        self.turns: dict[int, tuple[str, NaiveTurn, int]] = {}  # open turns by number: session, naive turn, since step
        self.forgotten: dict[str, int] = {}  # sessions asked to close when their turn ends
        self.stats: Counter[str] = Counter()
        self.steps = 0
        self._last_progress = 0
        self._last_executed = 0
        executor = WitnessExecutor(
            config.page_size,
            spec_of(config).groups,
            VOCAB,
            fail=lambda: self.rng.random() < config.fail_rate,
            late=lambda: self.rng.random() < 0.5,
        )
        self.executor = executor
        self.engine = Engine(
            executor,
            config.units,
            engine_config(config),
            vocab_size=VOCAB,
            eos_ids=(0,),
            clock=self.clock,
            random=Random(config.seed),
            proposer=self if config.lookahead else None,
        )
        self._operations = [
            (self.op_open, 6),
            (self.op_submit, 24),
            (self.op_append, 5),
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
        self._names = [operation for operation, _ in self._operations]
        self._weights = [weight for _, weight in self._operations]

    # -- the loop

    def run(self, steps: int) -> None:
        """`steps` engine steps with random operations between them."""
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        for _ in range(self.rng.choice((0, 1, 1, 2, 3))):
            self.rng.choices(self._names, self._weights)[0]()
        if self.rng.random() < 0.3:
            self.clock.advance(self.rng.random())
        self._run_engine()

    def finish(self) -> None:
        """Let every submitted turn end, close every session, and see that nothing is left."""
        for _ in range(PATIENCE):
            if not any(self._submitted(turn) for turn in self._open_turns()):
                break
            self._run_engine()
        for session_id in list(self.naive):
            self._close(session_id, finish=False)
        self._run_engine()
        self._run_engine()
        for pool in self.engine.memory.pools:
            assert pool.free == pool.capacity, (
                f"{pool.name}: {pool.capacity - pool.free} units are left in an empty engine"
            )

    def _run_engine(self) -> None:
        before = {sid: s.memory.computed for sid, s in self._sessions() if s.turn is None}
        dropped = self.engine.transitions["drop idle"]
        report = self.engine.step()
        self.steps += 1
        assert not self.engine.memory.cache.over_budget, "checkpoints exceed their budget"
        for turn in report.progressed:
            if turn.number in self.turns:
                self.turns[turn.number][1].check(turn.output)
        for turn in report.ended:
            self._ended(turn)
        self._forget_expired()
        if self.engine.transitions["drop idle"] == dropped:
            for sid, s in self._sessions():
                if s.turn is None and sid in before:
                    assert s.memory.computed >= before[sid], f"idle session {sid} lost memory without pressure"
        self._check_progress(report.progressed or report.ended)
        if self.steps % self.config.recount_every == 0:
            self.audit()

    def audit(self) -> None:
        """Full recount, and what must hold for every session."""
        self.engine.audit()
        for sid, session in self._sessions():
            naive = self.naive[sid]
            assert session.memory.computed <= max(0, len(session.history) - 1) or session.turn is not None
            assert len(session.history) == len(naive.tokens), f"{sid}: {len(session.history)} tokens"
            assert session.version == naive.version, f"{sid}: version {session.version}, not {naive.version}"
            self._check_memory(session.memory)
        self._check_references()

    def _check_references(self) -> None:
        """Every checkpoint knows how many sequences refer to it, and how many of them need it."""
        references: Counter[Checkpoint] = Counter()
        pins: Counter[Checkpoint] = Counter()
        for _, session in self._sessions():
            memory = session.memory
            for listed in [memory.checkpoints, *([memory.turn.checkpoints] if memory.turn is not None else [])]:
                references.update(listed)
                pins.update([listed.needed] if listed.needed is not None else [])
            if memory.turn is not None and memory.turn.source is not None:
                references[memory.turn.source] += 1
                pins[memory.turn.source] += 1
        for checkpoint, count in references.items():
            assert (checkpoint.references, checkpoint.pins) == (count, pins[checkpoint]), checkpoint.holder_name
        assert set(references) >= set(self.engine.memory.cache), "a cached checkpoint is nobody's"

    def _check_memory(self, memory: SessionMemory) -> None:
        """What a session and its turn hold is what their positions need, no more and no less."""
        size, turn, cache = self.config.page_size, memory.turn, self.engine.memory.cache
        positions = [c.position for c in memory.checkpoints]
        assert positions == sorted(set(positions)), f"checkpoints at {positions}"
        if self.engine.memory.spec.needs_checkpoints and memory.computed:
            assert positions, f"{memory.holder_name} has no checkpoint"
            assert positions[-1] == memory.computed, f"{memory.holder_name}: checkpoints at {positions}"
            assert memory.checkpoints.needed is memory.checkpoints[-1], f"{memory.holder_name} does not need its last"
        assert all((c in cache) == (c.pins == 0) for c in memory.checkpoints), "cached is what nobody needs"
        for table in memory.tables:
            if isinstance(table, FullTable):
                assert len(table.base) == pages_for(memory.computed, size), f"{len(table.base)} pages"
            if turn is None:
                assert table.own is None, f"{memory.holder_name} has no turn but a turn's units"
            elif not isinstance(table, StateTable):
                reached = int(self.engine.memory.rows.scheduled[turn.row]) if turn.row >= 0 else turn.computed
                guessed = reached + (
                    self.config.lookahead + 1 if turn.row >= 0 else 0
                )  # wrong guesses leave their pages
                assert table.entries <= pages_for(max(guessed, turn.start), size), (
                    f"{table.entries} entries for {reached}"
                )
                if isinstance(table, SlidingTable):
                    needed = min(table.first_entry(turn.computed), table.entries)
                    assert table.first + table.released >= min(needed, table.entries), (
                        "pages out of the window are held"
                    )
        if turn is not None:
            held = [c.position for c in turn.checkpoints]
            assert held == sorted(set(held)), f"a turn's checkpoints at {held}"
            assert not held or turn.start < held[0], f"checkpoints at {held} of a turn from {turn.start}"
            reached = int(self.engine.memory.rows.scheduled[turn.row]) if turn.row >= 0 else turn.computed
            assert not held or held[-1] <= reached, f"checkpoints at {held} of a turn at {reached}"

    def _check_progress(self, happened: object) -> None:
        if happened or self.executor.steps != self._last_executed or not any(map(self._submitted, self._open_turns())):
            self._last_progress, self._last_executed = self.steps, self.executor.steps
        assert self.steps - self._last_progress < STUCK_STEPS, f"nothing was computed for {STUCK_STEPS} steps"
        for turn in self._open_turns():
            since = self.turns[turn.number][2]
            assert not self._submitted(turn) or self.steps - since < PATIENCE, f"{turn!r} starves since step {since}"

    @staticmethod
    def _submitted(turn: Turn) -> bool:
        return turn.state is not TurnState.DRAFTING

    def _sessions(self):
        return [(s.id, s) for s in self.engine.sessions]

    def _open_turns(self) -> list[Turn]:
        return [s.turn for s in self.engine.sessions if s.turn is not None]

    # -- ends

    def _ended(self, turn: Turn) -> None:
        """Compare how a turn ended with what the naive model says, and take it in."""
        result = turn.result
        assert result is not None, f"{turn!r} ended without a result"
        sid, expected, _ = self.turns.pop(turn.number)
        naive = self.naive[sid]
        naive.turn = None
        expected.check(turn.output)
        if result.committed:
            kept = list(turn.output[: result.kept])
            if result.reason is EndReason.STOP:
                assert expected.finished, f"{turn!r} stopped early"
                assert expected.output[-1] in expected.stops, f"{turn!r} stopped without a stop token"
            elif result.reason is EndReason.LENGTH:
                assert len(turn.output) == expected.most, f"{turn!r}: {len(turn.output)} of {expected.most} tokens"
            elif result.reason is EndReason.APPENDED:
                assert not turn.output, f"{turn!r} generated though it only prefills"
            if result.reason is not EndReason.ABORT:
                assert len(kept) == len(turn.output)
            start = naive.records.pop()[0] if turn.replaces else expected.base
            naive.cut_tokens(expected.base)
            naive.extend(expected.input)
            input_end = len(naive.tokens)
            naive.extend(kept)
            if len(naive.tokens) > start:
                naive.records.append((start, input_end, len(naive.tokens)))
            naive.version += 1
        else:
            assert result.reason in (EndReason.ABORT, EndReason.DEADLINE, EndReason.FAILED), (
                f"{turn!r} did not commit: {result.reason}"
            )
        assert result.usage.prompt == expected.base + len(expected.input)
        assert result.usage.generated == len(turn.output)
        assert result.usage.cached <= max(0, result.usage.prompt - 1)
        session = turn.session
        assert session.history == array("i", naive.tokens), f"{sid}: history differs after {turn!r}"
        assert [(r.start, r.input_end, r.end) for r in session.records] == naive.records, f"{sid}: boundaries differ"
        assert result.version == naive.version
        if sid not in self.engine.sessions or self.engine.sessions.get(sid) is not session:
            self._forget(sid)

    def _forget(self, sid: str) -> None:
        self.naive.pop(sid, None)
        self.forgotten.pop(sid, None)

    def _forget_expired(self) -> None:
        for sid in [sid for sid in self.naive if sid not in self.engine.sessions]:
            if self.naive[sid].turn is not None:
                continue  # its end is reported by the next step
            self._forget(sid)

    # -- operations

    def _pick(self, want) -> str | None:
        found = [sid for sid, s in self._sessions() if sid in self.naive and want(s) and sid not in self.forgotten]
        return self.rng.choice(found) if found else None

    def _idle(self) -> str | None:
        return self._pick(lambda s: s.turn is None)

    def _tokens(self, most: int) -> list[int]:
        count = self.rng.choice((0, 1, 1, 2, 3, 5, 8, 13, 21, 34))
        return [self.rng.randrange(VOCAB) for _ in range(min(count, most))]

    def _params(self) -> TurnParams:
        rng = self.rng
        return TurnParams(
            max_new_tokens=rng.choice((None, 0, 1, 2, 5, 9, 20)),
            stop_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 1, 3)))),
            ignore_eos=rng.random() < 0.3,
            priority=rng.choice((None, None, None, 1, 2)),
            queue_timeout=rng.choice((None, None, 3.0)),
            timeout=rng.choice((None, 6.0, 12.0)),
        )

    def op_open(self) -> None:
        policy = Policy(
            priority=self.rng.choice((0, 0, 0, 1)),
            ttl=self.rng.choice((None, 15.0, 30.0)),
            max_tokens=self.rng.choice((None, None, None, self.config.context // 2)),
        )
        if len(self.naive) < self.config.sessions:
            session = self.engine.open(None, policy)
            self.naive[session.id] = NaiveSession()

    def op_submit(self) -> None:
        sid = self._idle()
        if sid is not None:
            self._submit(sid, self._tokens(self.config.context), self._params())

    def _submit(self, sid: str, tokens: list[int], params: TurnParams) -> None:
        naive = self.naive[sid]
        session = self.engine.sessions.get(sid)
        before = (session.memory.computed, session.version, session.turn)
        try:
            turn = self.engine.submit(sid, tokens, params)
        except TenutoError as error:
            self.stats[f"refused {error.code}"] += 1
            assert (session.memory.computed, session.version, session.turn) == before, (
                "a refused turn changed something"
            )
            room = session.limit - len(naive.tokens) - len(tokens)
            empty = not naive.tokens and not tokens and params.max_new_tokens != 0
            assert room < 1 or empty, f"refused with room for {room}: {error}"
            return
        self._opened(turn, sid, len(naive.tokens), tokens)

    def _opened(self, turn: Turn, sid: str, base: int, tokens: list[int]) -> None:
        naive = self.naive[sid]
        stops = set(turn.params.stop_ids) | (set() if turn.params.ignore_eos else {0})
        naive.turn = NaiveTurn(naive, base, tokens, turn.max_new_tokens, stops, VOCAB)
        if turn.params.max_new_tokens is not None:
            assert turn.max_new_tokens <= turn.params.max_new_tokens
        self.turns[turn.number] = (sid, naive.turn, self.steps)

    def op_one_shot(self) -> None:
        """A one-shot request: an ephemeral session that closes when its only turn ends."""
        if len(self.naive) >= self.config.sessions:
            return
        session = self.engine.open(None, Policy(ephemeral=True))
        self.naive[session.id] = NaiveSession()
        tokens = self._tokens(self.config.context - 1) or [1]
        params = self._params()
        self._submit(session.id, tokens, params)
        if session.turn is None:
            self._close(session.id, finish=False)
        else:
            self.forgotten[session.id] = 1

    def op_append(self) -> None:
        sid = self._idle()
        if sid is None:
            return
        tokens, naive = self._tokens(self.config.context), self.naive[sid]
        try:
            turn = self.engine.append(sid, tokens)
        except TenutoError as error:
            self.stats[f"refused {error.code}"] += 1
            assert len(naive.tokens) + len(tokens) > self.engine.sessions.get(sid).limit
            return
        self._opened(turn, sid, len(naive.tokens), tokens)

    def op_draft(self) -> None:
        again = self.rng.random() < 0.5
        drafting = lambda turn: turn is not None and turn.state is TurnState.DRAFTING  # noqa: E731
        sid = self._pick(lambda s: drafting(s.turn) or (s.turn is None and not again))
        if sid is None:
            return
        session, naive = self.engine.sessions.get(sid), self.naive[sid]
        if session.turn is None:
            tokens = self._tokens(self.config.context)
        else:  # typed on, corrected near the end, or rewritten
            old = list(session.turn.input)
            tokens = old[: max(0, len(old) - self.rng.choice((0, 1, 3, 7, 13, 99)))] + self._tokens(21)
        try:
            turn = self.engine.draft(sid, tokens)
        except TenutoError as error:
            self.stats[f"refused {error.code}"] += 1
            assert len(naive.tokens) + len(tokens) > session.limit, f"draft refused: {error}"
            return
        self._opened(turn, sid, len(naive.tokens), tokens)

    def op_submit_draft(self) -> None:
        sid = self._pick(lambda s: s.turn is not None and s.turn.state is TurnState.DRAFTING)
        if sid is None:
            return
        turn = self.engine.sessions.get(sid).turn
        tokens = list(turn.input) if self.rng.random() < 0.7 else list(turn.input)[:-1] + self._tokens(5)
        self._submit(sid, tokens, self._params())

    def op_regenerate(self) -> None:
        sid = self._pick(lambda s: s.turn is None and bool(s.records) and s.records[-1].end > s.records[-1].input_end)
        if sid is None:
            return
        naive = self.naive[sid]
        params = self._params()
        try:
            turn = self.engine.regenerate(sid, params)
        except TenutoError as error:
            self.stats[f"refused {error.code}"] += 1
            assert params.max_new_tokens == 0, f"regenerate refused: {error}"
            return
        self._opened(turn, sid, naive.records[-1][1], [])

    def op_abort(self) -> None:
        wanted = self.rng.choice((None, None, *(state for state in TurnState if not state.ended)))
        sid = self._pick(lambda s: s.turn is not None and wanted in (None, s.turn.state))
        if sid is not None:
            self._abort(sid)

    def op_preempt(self) -> None:
        """A running turn loses its units, and then something happens to it before it can resume."""
        kept = self.rng.random() < 0.7
        sid = self._pick(lambda s: s.has_running_turn and (not kept or s.memory.computed > 0))
        if sid is None:
            return
        turn = self.engine.sessions.get(sid).turn
        self.engine.lifecycle.preempt(turn)
        what = self.rng.random()
        if kept and what < 0.8:
            self.engine.drop(sid)
        elif what < 0.45:
            self._abort(sid)
        elif what < 0.9:
            self._jump_to_deadline(turn)

    def op_deadline(self) -> None:
        """The clock jumps to where a deadline of some open turn has passed."""
        state = self.rng.choice((TurnState.DRAFTING, TurnState.QUEUED, TurnState.QUEUED, TurnState.RUNNING))
        found = [turn for turn in self._open_turns() if turn.state is state]
        if found:
            self._jump_to_deadline(self.rng.choice(found))
        elif self.rng.random() < 0.1:
            self.clock.advance(50.0)

    def _jump_to_deadline(self, turn: Turn) -> None:
        if turn.state is TurnState.DRAFTING:
            when = turn.changed + self.engine.config.draft_timeout
        else:
            limits = [turn.params.timeout, None if turn.started else turn.params.queue_timeout]
            when = turn.arrival + min((limit for limit in limits if limit is not None), default=0.0)
        self.clock.advance(max(0.0, when - self.clock.now()))

    def _abort(self, sid: str) -> None:
        session = self.engine.sessions.get(sid)
        turn, memory = session.turn, session.memory
        keep = self.rng.choice((None, None, DELIVERED, 0, 1, 3))
        before, computed = memory.computed, memory.turn.computed if memory.turn is not None else memory.computed
        start = memory.turn.start if memory.turn is not None else 0
        outputs = len(turn.output)
        running, started = turn.state is TurnState.RUNNING, turn.started
        self.engine.abort(sid, keep)
        assert turn.result is not None, f"{turn!r} was aborted and has not ended"
        assert turn.result.committed == (started and keep is not None), f"{turn!r} ended otherwise than asked"
        if turn.result.committed:
            kept = max(0, len(session.history) - 1)
            if self.config.mix == (Kind.FULL,):
                assert memory.computed == min(kept, max(computed, start)) or not running, (
                    "a barge-in lost computed tokens"
                )
            elif running and outputs and computed >= turn.resume_position:
                reached = min(kept, turn.resume_position)
                assert memory.computed >= reached, f"a barge-in fell to {memory.computed}, behind {reached}"
        else:
            assert memory.computed == before or sid not in self.engine.sessions, "an abort cost the session its memory"
        self._run_engine()

    def op_fork(self) -> None:
        running = self.rng.random() < 0.5
        sid = self._pick(lambda s: s.has_running_turn or not running)
        if sid is None or len(self.naive) >= self.config.sessions:
            return
        session, naive = self.engine.sessions.get(sid), self.naive[sid]
        how = self.rng.random()
        if how < 0.5:
            child, at = self.engine.fork(sid), len(naive.tokens)
            assert child.memory.computed == min(session.memory.computed, max(0, at - 1)), "a fork at the end shares all"
        elif how < 0.8:
            turn = self.rng.randint(0, len(naive.records))
            child, at = self.engine.fork(sid, turn=turn), naive.records[turn - 1][2] if turn else 0
        else:
            at = self.rng.randint(0, len(naive.tokens))
            child = self.engine.fork(sid, position=at)
        if self.config.mix == (Kind.FULL,):
            assert child.memory.computed == min(session.memory.computed, max(0, at - 1))
        mine = [c.position for c in session.memory.checkpoints if c.position < child.memory.computed]
        its = [c.position for c in child.memory.checkpoints[:-1]]
        assert its == mine, f"a fork has checkpoints at {its}, its parent below at {mine}"
        self.naive[child.id] = naive.fork(at)
        assert child.history == array("i", self.naive[child.id].tokens)

    def op_rewind(self) -> None:
        sid = self._idle()
        if sid is None:
            return
        session, naive = self.engine.sessions.get(sid), self.naive[sid]
        computed = session.memory.computed
        if self.rng.random() < 0.5:
            turn = self.rng.randint(0, len(naive.records))
            at = naive.records[turn - 1][2] if turn else 0
            self.engine.rewind(sid, turn=turn)
        else:
            at = self.rng.randint(0, len(naive.tokens))
            self.engine.rewind(sid, position=at)
        naive.cut(at)
        naive.version += 1
        if self.config.mix == (Kind.FULL,):
            assert session.memory.computed == min(computed, max(0, at - 1)), "a rewind lost what it could keep"
        assert session.history == array("i", naive.tokens)

    def op_close(self) -> None:
        busy = self.rng.random() < 0.5
        sid = self._pick(lambda s: s.turn is not None or not busy)
        if sid is not None:
            self._close(sid, finish=self.rng.random() < 0.7)

    def _close(self, sid: str, *, finish: bool) -> None:
        session = self.engine.sessions.get(sid)
        self.engine.close(sid, finish=finish)
        if sid not in self.engine.sessions:
            if session.turn is None and self.naive[sid].turn is None:
                self._forget(sid)
        else:
            self.forgotten[sid] = 1

    def op_drop(self) -> None:
        state = self.rng.choice((None, TurnState.QUEUED, TurnState.QUEUED, TurnState.QUEUED))
        wanted = lambda turn: turn is None if state is None else turn is not None and turn.state is state  # noqa: E731
        sid = self._pick(lambda s: wanted(s.turn) and s.memory.computed > 0)
        if sid is None and state is not None:  # make one that waits
            sid = self._pick(lambda s: s.turn is None and s.memory.computed > 0)
            if sid is not None:
                self._submit(sid, self._tokens(self.config.context), self._params())
        if self.rng.random() < 0.1:
            self.engine.drop()
        elif sid is not None:
            session = self.engine.sessions.get(sid)
            drafted = session.turn is not None and session.memory.turn is not None
            self.engine.drop(sid)
            assert drafted or session.memory.computed == 0, "a dropped session still holds memory"

    def op_illegal(self) -> None:
        """What the states do not allow is refused with a typed error and changes nothing."""
        engine, rng = self.engine, self.rng
        busy = self._pick(lambda s: s.turn is not None and s.turn.state is not TurnState.DRAFTING)
        idle = self._idle()
        calls = [lambda: engine.submit("nobody", [1]), lambda: engine.open("", Policy())]
        if busy is not None:
            calls += [
                lambda: engine.submit(busy, [1]),
                lambda: engine.rewind(busy, turn=0),
                lambda: engine.regenerate(busy),
                lambda: engine.draft(busy, [1]),
                lambda: engine.append(busy, [1]),
                lambda: engine.open(busy),
            ]
        if idle is not None:
            calls += [
                lambda: engine.abort(idle),
                lambda: engine.submit(idle, [VOCAB]),
                lambda: engine.submit(idle, [1] * (self.config.context + 1)),
                lambda: engine.rewind(idle, position=10**6),
                lambda: engine.fork(idle, turn=10**6),
            ]
        try:
            rng.choice(calls)()
        except TenutoError as error:
            self.stats[f"refused {error.code}"] += 1
        else:
            raise AssertionError("an illegal operation was accepted")

    # -- lookahead

    def propose(self, turn: Turn, most: int) -> list[int]:
        """Guesses for the planner: right, wrong, or right at first."""
        guesses = self.turns[turn.number][1].guess(turn.output, self.rng.randint(0, most))
        return [g if self.rng.random() < 0.7 else self.rng.randrange(VOCAB) for g in guesses]
