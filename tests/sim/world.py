"""An engine on the witness, mirrored by the naive model: every step and every end of a turn is checked.

A failing seed is a bug report: `python -m tests.sim --seed N` runs it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from random import Random

from tenuto.base.groups import Kind
from tenuto.base.plan import Plan
from tenuto.base.turns import EndReason, Keep, TurnResult, TurnState
from tenuto.engine.engine import StepReport
from tenuto.sched.predictor_proposer import PredictorProposer
from tenuto.sched.suspects import MAX_FAILURES
from tenuto.session.records import SavedSession
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tenuto.text.stream import TextStream
from tests.clock import ManualClock
from tests.sim import internals, keeping
from tests.sim.adapters import PATHS, load
from tests.sim.checked import CheckedExecutor
from tests.sim.copies import SlowCopies
from tests.sim.disk import FaultyDisk
from tests.sim.found import Found
from tests.sim.grammars import LateMasks
from tests.sim.guesses import proposer_of
from tests.sim.heads import HeadedExecutor
from tests.sim.journals import WorldJournal
from tests.sim.letters import EOS, VOCAB
from tests.sim.mapped import Mapped
from tests.sim.naive import Letters, NaiveSession, NaiveTurn
from tests.sim.setting import WorldConfig, engine_config
from tests.sim.slots import Needed, SlotChecker
from tests.sim.tenants import OfTenant, check_tenants
from tests.sim.training import Training
from tests.sim.transitions import Log, watched_engine
from tests.sim.watch import Watch

MAPPED_EVERY = 6  # steps between two looks at the map
PATIENCE = 6000  # steps a submitted turn may take from its opening to its end
SELF_ENDED = (EndReason.STOP, EndReason.LENGTH, EndReason.APPENDED)


class World:
    """One engine, its naive model, and the invariants between them."""

    def __init__(self, config: WorldConfig, ignored: Collection[str] = ()) -> None:
        self.config = config
        self.ignored = frozenset(ignored)
        self.rng = Random(config.seed * 7919 + 1)
        self._chance = Random(config.seed)  # of checks: the world takes the same course whatever is checked
        self._faults = Random(config.seed * 31 + 7)  # of copies and disks
        self.adapting = Random(config.seed * 29 + 11)  # choices of adapters
        self.adapters = dict(PATHS) if config.adapters else {}  # the weights of those loaded, by name
        self.limiting = Random(config.seed * 23 + 5)  # limits of turns, and tokens that they name
        self._late = Random(config.seed * 17 + 3)  # of masks
        self.clock = ManualClock()
        self.naive: dict[str, NaiveSession] = {}
        self.turns: dict[int, NaiveTurn] = {}  # open turns by number
        self.stats: Counter[str] = Counter()  # broken rules that were ignored, and refusals
        self.steps = 0
        self.looking = True  # whether this step is compared slot by slot
        self.failed_at = -(10**9)  # the last step that failed
        self.failures = 0
        self.ended_as: dict[int, EndReason] = {}  # by number
        self.asked: dict[int, Keep] = {}  # what each turn that an operation aborts should keep
        self.log = Log()
        self._sizes = [
            n * (config.page_size if group.paged else 1) for n, group in zip(config.units, config.groups, strict=True)
        ]
        self.disk = self._disk(config) if config.tiers else None
        self.training = Training(self)
        self.tenants: dict[str, str] = {}  # of all sessions ever opened
        self.journal = WorldJournal(config.seed, ends=config.tiers)
        self.engines = 0  # the number begun so far
        self._begin()

    def _disk(self, config: WorldConfig) -> FaultyDisk:
        return FaultyDisk(self._faults, fills_early=not config.overtaking, swaps=not config.erases)

    def _begin(self) -> None:
        """Begins a new engine, with what observes it."""
        config = self.config
        self.copies = SlowCopies(self._faults)
        self.masks = LateMasks(self._late)
        proposer = proposer_of(self, config.guesses)
        predictor = proposer if isinstance(proposer, PredictorProposer) else None
        self.executor: CheckedExecutor = (HeadedExecutor if predictor else CheckedExecutor)(
            self,
            fail=lambda: self.step_fails(self.executor.collecting),
            written=lambda: self._faults.choice((0.0, 1.0, self._faults.random())),
            late=lambda: self.rng.random() < 0.5,
            copy_fails=lambda: self._faults.random() < config.copy_fail_rate,
        )
        self.engine = watched_engine(
            self.log,
            self.executor,
            config.units,
            engine_config(config),
            vocab_size=VOCAB,
            eos_ids=(EOS,),
            clock=self.clock,
            random=Random(config.seed + 1_000_003 * self.engines),
            text=partial(TextStream, Letters()) if config.text else None,  # type: ignore[arg-type]
            proposer=proposer,
            predictor=predictor,
            masks=self.masks if config.grammars else None,
            disk=self.disk,
            carrier=self.copies,
            identity=self.training.identities[-1],
        )
        self.training.begin()
        if config.seed % 4:
            self.engine.snapshots.pause = self.engine.snapshots.delay = (
                0.0  # often there is no time for saves otherwise
            )
        for name, path in self.adapters.items():
            load(self.engine, name, path)
        self.engines += 1
        self._slots = SlotChecker(
            config.page_size, len(config.groups), self.training.marks, *([1] if config.prefixes else [])
        )
        self.watch = Watch(self)
        self._mapped = Mapped(self.engine)

    def own(self, sid: str) -> OfTenant:
        """Returns the tenant of a present or past session, as keyword arguments of the engine's operations."""
        return {"tenant": self.tenants.get(sid, "")}

    def session_of(self, sid: str) -> Session:
        """Returns the engine's session."""
        return self.engine.registry.get(sid, **self.own(sid))

    def is_open(self, sid: str) -> bool:
        """Returns whether the engine has the session."""
        return self.engine.registry.find(sid, **self.own(sid)) is not None

    def found(self, rule: str, message: str) -> None:
        """Raises `Found` for a broken rule, or only counts it if the rule is ignored."""
        if rule not in self.ignored:
            raise Found(rule, message)
        self.stats[rule] += 1

    @property
    def longest(self) -> int:
        """The longest sequence that fits the empty pools and the context; its last token is never computed."""
        config = self.config
        full = [n for n, group in zip(config.units, config.groups, strict=True) if group.kind is Kind.FULL]
        return min([config.context, *(n * config.page_size + 1 for n in full)])

    # -- called by the executor

    def planned(self, plan: Plan) -> dict[int, int]:
        """Notes a plan given to the executor. Returns the position where it ends for each of its turns, by number."""
        ends = {}
        for row, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
            turn: Turn | None = self.engine.batch.turns[row]
            naive = self.turns.get(turn.number) if turn is not None else None
            if turn is None or naive is None:
                self.found("plan", f"step {plan.step} has row {row}, which no open turn has")
                continue
            ends[turn.number] = start + count
            self.training.follow(turn)
            naive.computed += count
            if turn.started and naive.first_start < 0:
                naive.first_start = start
        return ends

    def step_fails(self, members: Mapping[int, int]) -> bool:
        """Returns whether a step fails that takes these turns to these positions."""
        poisons = ((self.turns[number].poisoned_from, end) for number, end in members.items() if number in self.turns)
        return any(at is not None and end > at for at, end in poisons) or self.rng.random() < self.config.fail_rate

    def landed(self, members: Collection[int], *, failed: bool) -> None:
        if failed:
            self.failed_at = self.steps
            self.failures += 1
            for turn in self.turns.values():
                turn.disturbed = turn.disturbed or not turn.drafting
        for number in members:
            if number in self.turns:
                self.turns[number].last_failed = failed
                self.turns[number].failed_alone += failed and len(members) == 1

    def needed(self) -> Needed:
        """Returns the slots that a step may not write."""
        for session in self.engine.registry:
            if session.turn is not None and session.turn.number in self.turns:
                self.followed(session.turn)
        return self._slots.needed(self._sizes, self.engine, self.naive, self.turns)

    def followed(self, turn: Turn) -> NaiveTurn:
        """Returns the naive turn, which has checked the output so far and has the same."""
        naive = self.turns[turn.number]
        if (wrong := naive.check(turn.output)) is not None:
            self.found("output", f"{turn!r}: {wrong}")
        return naive

    # -- the loop

    def step(self) -> StepReport:  # noqa: C901, PLR0912 - one rule after the other
        """Runs one step of the engine and checks everything that must hold after it."""
        now = self.clock.now()
        timeout = self.engine.config.draft_timeout
        due = {n for n, t in self.turns.items() if (when := t.deadline(timeout)) is not None and when <= now}
        expiring = {sid for sid, naive in self.naive.items() if naive.expires(now)}
        self.looking = self._chance.random() < self.config.look
        self.watch.before()
        self.copies.go_on()
        self.masks.go_on()
        report = self.engine.step()
        self.journal.note(report.changes)
        self.steps += 1
        for turn in report.progressed:
            self._progressed(turn)
        for turn in report.ended:
            if turn.number in self.turns:
                self.ended(turn, due)
        for number in due & self.turns.keys():
            self.found("deadlines", f"turn {number} goes on past its deadline at {now}")
        for sid in expiring:
            self.naive.pop(sid)
            if self.is_open(sid):
                self.found("expiry", f"session {sid} is still open at {now}")
        for session in self.engine.registry:
            if session.turn is not None and session.turn.started and session.turn.number in self.turns:
                self.turns[session.turn.number].started = True
        if len(self.naive) != len(self.engine.registry) or any(not self.is_open(sid) for sid in self.naive):
            lost = [sid for sid in self.naive if not self.is_open(sid)]
            self.found("expiry", f"sessions {lost} are gone, of {len(self.naive)}; {len(self.engine.registry)} remain")
            self.naive = {sid: naive for sid, naive in self.naive.items() if sid not in lost}
        self.watch.after(report)
        self.training.check()
        if self.steps % MAPPED_EVERY == 0 and (wrong := self._mapped.look()) is not None:
            self.found("map", wrong)
        if self.looking:
            try:
                self._slots.compare(self.executor._slots, self.engine, self.naive, self.turns)
            except Found as error:
                self.found(error.rule, str(error))
        if self._chance.random() * self.config.recount_every < 1:
            self.audit()
        return report

    def _progressed(self, turn: Turn) -> None:
        if turn.number not in self.turns:
            self.found("ends", f"{turn!r} progressed after its end")
            return
        naive = self.followed(turn)
        if turn.text is not None:
            naive.pieces.append(turn.text.take_text())

    def audit(self) -> None:
        """Recounts everything and checks what must hold for every session."""
        self.engine.audit()
        tokens: Counter[str] = Counter()
        for session in self.engine.registry:
            naive = self.naive[session.id]
            tokens[session.policy.tenant] += len(naive.tokens)
            if session.turn is None and session.memory.computed > max(0, len(session.history) - 1):
                self.found("history", f"{session.id} has {session.memory.computed} tokens computed")
            if len(session.history) != len(naive.tokens) or session.version != naive.version:
                self.found("history", f"{session.id}: {len(session.history)} tokens, version {session.version}")
        for tenant, count in tokens.items():
            if self.engine.registry.use(tenant).tokens != count:
                self.found("tenants", f"{self.engine.registry.use(tenant)}, its sessions have {count} tokens")
        internals.check_tables(self.engine, self.config.lookahead)
        if (told := self.engine.pressure.reclaimable().tolist()) != (counted := internals.reclaimable(self.engine)):
            self.found("rungs", f"closed sessions and checkpoints could free {told} units; the count is {counted}")
        check_tenants(self.engine.registry)
        if (kept := keeping.kept_in_vain(self.engine)) is not None:
            self.found("kept in vain", kept)
        if self._chance.random() < 0.02:
            self._audit_the_auditor()

    def _audit_the_auditor(self) -> None:
        with internals.flight_touches_a_free_unit(self.engine) as planted:
            if not planted:
                return
            try:
                self.engine.audit()
            except Exception:  # noqa: BLE001 - it stops the engine, which is set going again
                self.engine.fuse.broken = None
                return
        self.found("audit", "the audit missed a free unit that the step in flight names")

    def restart(self, *, killed: bool) -> None:
        """Ends the engine and begins another one with the lasting sessions of the journal, at their last commits.
        Unless it is `killed`, it saves its memory to disk."""
        saved = [session.saved() for session in self.engine.registry if session.policy.lasting]
        turns = [s.turn for s in self.engine.registry if s.turn is not None]
        if not killed:
            self.asked.update({turn.number: None for turn in turns})
            self.engine.sessions.save()
            for turn in turns:
                self.ended(turn)
            self.engine.audit()
        self.engine.end(keep=True)
        saved = self._journaled([each for each in saved if killed or self.is_open(each.session)])
        lasting = {each.session: self.naive[each.session] for each in saved}
        self.naive, self.turns, self.asked = lasting, {}, {}
        self._begin()
        for each in saved:
            self.engine.sessions.restore(each, journaled=True)
        self.engine.sessions.recover()
        for naive in lasting.values():
            naive.turn, naive.closing, naive.last_end, naive.had = None, False, self.clock.now(), {}
        self.audit()

    def _journaled(self, saved: list[SavedSession]) -> list[SavedSession]:
        """Returns the sessions still in the journal, checked to be as they were saved. The journal must have reported
        the others as damaged."""
        self.journal.note(self.engine.outcomes.take_changes())
        found, damage = self.journal.begin_again()
        if [each for each in saved if each in found] != found:
            self.found("journal", f"the journal returns {found} of {saved}")
        lost = [each.session for each in saved if each not in found]
        named = {each.name for each in damage.sessions} if damage is not None else set()
        if damage is not None and not self.journal.harmed:
            self.found("journal", f"the journal reports {damage}, though no bit was flipped")
        if damage is not None and damage.changes:
            self.found("journal", f"{damage.changes} changes are lost to one flipped bit")
        if lost and (damage is None or (len(lost) > len(named) + damage.missing)):
            self.found("journal", f"the journal has lost {lost}, and reports {damage}")
        return found

    # -- ends

    def ended(  # noqa: C901, PLR0912 - one rule after the other
        self, turn: Turn, due: Collection[int] = ()
    ) -> None:
        """Compares the end of a turn with the naive model and commits it there."""
        result = turn.result
        naive = self.turns.pop(turn.number)
        session = naive.session
        asked = self.asked.pop(turn.number, None) if turn.number in self.asked else "nobody"
        if result is None:
            raise Found("ends", f"{turn!r} ended without a result")
        if (wrong := naive.check(turn.output)) is not None:
            self.found("output", f"{turn!r}: {wrong}")
        reason = self.ended_as[turn.number] = result.reason
        if result.committed:
            self._check_commit(turn, naive, result, asked)
            output = turn.output[: result.kept]
            if session.turn is naive:
                session.commit(naive.base, naive.input, output, replaces=naive.replaces)
                session.had = {n: min(had, len(session.tokens)) for n, had in naive.had.items()}
        elif reason is EndReason.DEADLINE:
            if turn.number not in due:
                self.found("deadlines", f"{turn!r} ended at {self.clock.now()} although not due")
        elif reason is EndReason.GRAMMAR:
            if not naive.stuck:
                self.found("grammar", f"{turn!r} is stuck after {naive.output}, although its grammar allows more")
        elif reason is EndReason.ABORT:
            if asked == "nobody" or (asked is not None and naive.started):
                self.found("ends", f"{turn!r} was rolled back when asked to keep {asked}")
        elif reason is not EndReason.FAILED or not naive.last_failed or naive.failed_alone < MAX_FAILURES:
            self.found("ends", f"{turn!r} ended as {reason}")
        elif self.watch.healthy(naive):
            self.found("failures", f"{turn!r} ended as failed, although only others make steps fail")
        session.turn = None
        session.last_end = self.clock.now()
        self._check_result(turn, naive, result)
        if session.closing or session.policy.ephemeral:
            self.naive.pop(naive.sid, None)
            if self.is_open(turn.session.id):
                self.found("ends", f"{naive.sid} is open after its last turn")

    def _check_commit(self, turn: Turn, naive: NaiveTurn, result: TurnResult, asked: object) -> None:
        output, reason = naive.output, result.reason
        if naive.stuck:
            self.found("grammar", f"{turn!r} was committed with {output}, which breaks its grammar")
        if naive.follower is not None and not naive.follower.legal(output[: result.kept], whole=naive.complete):
            self.found("grammar", f"{turn!r} was committed with {output[: result.kept]}: not a text of its grammar")
        if reason is EndReason.ABORT:
            if asked == "nobody" or asked is None or not naive.started:
                self.found("ends", f"{turn!r} was committed when asked to keep {asked}")
                return
            most = naive.delivered if asked == "delivered" else asked
            assert isinstance(most, int)
            wanted = min(most, len(output))
            if result.kept != wanted:
                self.found("kept", f"{turn!r} kept {result.kept} of {len(output)} tokens, asked {asked}, not {wanted}")
            return
        expected = EndReason.STOP if naive.stopped else EndReason.LENGTH if naive.most else EndReason.APPENDED
        if reason is not expected or not (naive.finished or expected is EndReason.APPENDED):
            self.found("ends", f"{turn!r} ended as {reason} with {output} of {naive.most}, stops {naive.stops}")
        if result.kept != len(output) or (expected is EndReason.APPENDED and output):
            self.found("kept", f"{turn!r} kept {result.kept} of {len(output)} tokens")
        stop: object = None
        if expected is EndReason.STOP:
            found = naive.text.found(output) if naive.text is not None else None
            stop = output[-1] if output[-1] in naive.stops else found[1] if found is not None else None
        if result.stop != stop:
            self.found("ends", f"{turn!r} reports that it was stopped by {result.stop!r}, not {stop!r}")

    def _check_result(  # noqa: C901, PLR0912 - one rule after the other
        self, turn: Turn, naive: NaiveTurn, result: TurnResult
    ) -> None:
        session, usage = naive.session, result.usage
        self.training.check_versions(turn, naive)
        if turn.session.history != naive.session.tokens:
            self.found("history", f"{naive.sid}: history differs after {turn!r}")
        if [(r.start, r.input_end, r.end) for r in turn.session.records] != session.records:
            self.found("history", f"{naive.sid}: boundaries differ after {turn!r}")
        if result.version != session.version:
            self.found("history", f"{turn!r} reports version {result.version}, not {session.version}")
        if (result.max_new_tokens, result.context_left) != (naive.most, session.limit - len(session.tokens)):
            self.found("limits", f"{turn!r}: {result}, of {session.limit}")
        if (usage.prompt, usage.generated) != (naive.prompt, len(naive.output)):
            self.found("usage", f"{turn!r}: {usage}, with {naive.prompt} tokens of history and input")
        if usage.computed != naive.computed:
            self.found("computed", f"{turn!r}: {usage}; {naive.computed} of its tokens were given to the executor")
        if naive.first_start >= 0 and not naive.disturbed and usage.cached != min(naive.first_start, naive.prompt):
            self.found("cached", f"{turn!r}: {usage}; its first step began at {naive.first_start}")
        if usage.cached > max(0, naive.prompt - 1) and naive.most:
            self.found("cached", f"{turn!r}: {usage}")
        if turn.output_logprobs != naive.output_logprobs():
            self.found("logprobs", f"{turn!r}: {turn.output_logprobs}, not {naive.output_logprobs()}")
        if naive.params.input_logprobs is None and turn.input_scores:
            self.found("logprobs", f"{turn!r} got scores of its input without asking for them")
        if naive.params.input_logprobs is not None:
            scored, wanted = list(turn.input_logprobs), naive.input_logprobs()
            whole = bool(naive.output) or result.reason is EndReason.APPENDED
            if scored != wanted[: len(scored)] or (whole and naive.most and len(scored) != len(wanted)):
                self.found("logprobs", f"{turn!r} input: {scored}, not {wanted}")
        vector = turn.pool.vector() if turn.pool is not None else b""
        if vector != naive.vector() and (vector or naive.output):
            self.found("vectors", f"{turn!r} has the vector {vector.hex()}, not {naive.vector().hex()}")
        if naive.text is not None and turn.text is not None:
            text = "".join(naive.pieces) + turn.text.take_text()
            wanted_text = naive.text.whole(naive.output, ended=result.reason in SELF_ENDED)
            if text != wanted_text:
                self.found("text", f"{turn!r} gave {text!r}, not {wanted_text!r}")

    def finish(self) -> None:  # noqa: C901, PLR0912 - one rule after the other
        """Lets every submitted turn end, closes every session, and checks that nothing is left."""
        for _ in range(PATIENCE):
            if not any(not turn.drafting for turn in self.turns.values()):
                break
            self.step()
        for _ in range(40):
            if self.engine.idle:
                break
            self.step()
        self.watch.drafts_are_computed()
        for sid in list(self.naive):
            if self.is_open(sid):
                turn = self.session_of(sid).turn
                if turn is not None:
                    self.asked[turn.number] = None
                self.naive[sid].closing = turn is not None
                self.engine.sessions.close(sid, **self.own(sid))
                if turn is not None:
                    self.ended(turn)
                self.naive.pop(sid, None)
        if len(left := self.engine.idle_memory):
            self.found("leaks", f"bytes of tiers are left over: {left.used}")
        if self.config.prefixes:
            self.engine.sessions.drop()
        self.step()
        self.step()
        self.step()
        if (proposer := self.engine.core.proposer) is not None:
            proposer.release({"kv_cache"})
        for pool in self.engine.pools:
            if pool.free != pool.capacity:
                self.found("leaks", f"{pool.name}: {pool.capacity - pool.free} units are left in an empty engine")

    def waiting(self) -> list[Turn]:
        """Returns submitted turns without a row."""
        turns = [s.turn for s in self.engine.registry if s.turn is not None]
        return [turn for turn in turns if turn.state in (TurnState.QUEUED, TurnState.PREEMPTED)]
