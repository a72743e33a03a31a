"""Planning of a step: divides tokens among running turns. Proposing changes nothing; applying changes every pool."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from tenuto.base.config import EngineConfig
from tenuto.base.errors import InvariantError
from tenuto.base.plan import PREVIOUS_SAMPLE, InputScores, InputVectors, Plan, TokenMasks
from tenuto.memory.kinds.group import Mask, MemoryChanges
from tenuto.memory.memory import Memory
from tenuto.memory.rows import Longs
from tenuto.sched.batch import Batch, RowUpdates
from tenuto.sched.guesses import NO_GUESSES, Guesses, NextStep, Proposer, StepTimes, chosen_counts
from tenuto.sched.predictor import Predictor
from tenuto.sched.predictor_proposer import PredictorProposer
from tenuto.sched.proposal import Flight, InputPart, Lacking, Proposal
from tenuto.sched.shares import divide
from tenuto.sched.suspects import Suspects
from tenuto.session.turn import Turn

MAX_SCORES = 256
"""Maximum number of input tokens scored in a step. Scoring one takes several times the memory of its logits for the
whole vocabulary."""
FIRST_SHARE = 4
"""The divisor of what prefills of one priority get: a quarter of it is for the first of them in running order."""


class Planner:
    """Makes and applies plans of at most `config.token_budget` tokens. Those of several turns have at most
    `config.mixed_budget` besides one of each: a long step delays decodes, and prefills that end in one step all get
    their first tokens late."""

    def __init__(
        self,
        memory: Memory,
        batch: Batch,
        suspects: Suspects,
        config: EngineConfig,
        proposer: Proposer | None,
        predictor: PredictorProposer | None = None,
    ) -> None:
        self._memory = memory
        self._batch = batch
        self._suspects = suspects
        self._budget = config.token_budget
        self._mixed_budget = config.mixed_budget
        self._proposer = proposer
        self._lookahead = config.lookahead
        self.times = StepTimes()
        self.predictor = Predictor(predictor, batch, self.times, config.lookahead) if predictor is not None else None
        self._steps = 0
        self.rows_considered = 0  # in total: a measure of work

    def propose(self, *, at_worst: bool = False) -> Proposal:
        """Proposes a step: divides the token budget, decodes first, then prefills. Turns that do not fit memory now are
        left out. While suspects can run, only one group of them does. Rows with slow masks wait while others can run.
        `at_worst` is for when none of these fits: then slow rows run too, and all others if no suspect fits."""
        rows, order = self._memory.rows, self._batch.order()
        self.rows_considered += len(order)
        starts = rows.scheduled[order]
        wanted = np.minimum(rows.expected[order], rows.limit[order]) - starts
        wanted[rows.uncertain[order]] = 0
        if self._batch.held:
            wanted[np.isin(order, list(self._batch.held))] = 0
        if not at_worst and (suspected := self._suspects.rows(self._batch.held)):
            wanted[~np.isin(order, suspected)] = 0
        if not at_worst and self._batch.constrained[order].any():
            self._leave_out_slow(order, wanted)
        if self._memory.stands_at_step_ends:
            np.minimum(wanted, rows.mark[order] - starts, out=wanted)
        if self._batch.scoring:
            self._limit_scoring(order, wanted)
        counts = self._divide(order, wanted)
        needs, fits = self._fit(order, starts + counts)
        lacking = last_lacking = None
        if not fits.all():
            lacking = self._lacking(order, needs, fits)
            last_lacking = self._batch.turns[order[(~fits).nonzero()[0][-1]]]
            counts[~fits] = 0
        if at_worst and (suspected := self._suspects.rows(order[counts == 0].tolist())):
            counts[~np.isin(order, suspected)] = 0
        chosen = counts.nonzero()[0]
        if len(chosen) == len(order):
            proposal = Proposal(order, starts, counts, needs, lacking, last_lacking)
        else:
            part = order[chosen], starts[chosen], counts[chosen], needs[:, chosen]
            proposal = Proposal(*part, lacking, last_lacking)
        if self._proposer is not None:
            self._look_ahead(proposal, self._proposer)
        return proposal

    def _leave_out_slow(self, order: Longs, wanted: Longs) -> None:
        """Leaves out rows with slow masks until their next mask is known, since a step waits for all of its masks. Does
        nothing if no other row can continue."""
        rows, fast = self._memory.rows, wanted.copy()
        for index in self._batch.constrained[order].nonzero()[0].tolist():
            row = int(order[index])
            constraint = self._batch.turns[row].constraint
            if constraint.slow and (rows.expected[row] > rows.known[row] or not constraint.ready):
                fast[index] = 0
        if fast.any():
            wanted[:] = fast

    def _limit_scoring(self, order: Longs, wanted: Longs) -> None:
        """Limits rows whose input is scored to equal shares of `MAX_SCORES`, at least one token each."""
        rows = list(self._batch.scoring)
        scoring = np.isin(order, rows)
        wanted[scoring] = np.minimum(wanted[scoring], max(1, MAX_SCORES // len(rows)))

    def _divide(self, order: Longs, wanted: Longs) -> Longs:
        """Returns the tokens of each row. Every row gets one; prefills share the rest by their tenants' weights; drafts
        get the remainder."""
        counts = np.minimum(wanted, 1)
        prefills = (wanted > 1).nonzero()[0].tolist()
        if not prefills:
            return counts
        rows = int(counts.sum())
        left = self._most(rows) - rows
        turns = self._batch.turns
        for drafting in (False, True):
            tenants: dict[str, list[int]] = {}
            for index in prefills:
                turn: Turn = turns[order[index]]
                if turn.drafting is drafting:
                    tenants.setdefault(turn.session.policy.tenant, []).append(index)
            wishes = {tenant: int(wanted[rows].sum()) - len(rows) for tenant, rows in tenants.items()}
            weights = {tenant: self._batch.shares.weight(turns[order[rows[0]]]) for tenant, rows in tenants.items()}
            for tenant, tokens in divide(left, wishes, weights).items():
                self._share_out(tokens, tenants[tenant], order, wanted, counts)
                left -= tokens
        return counts

    def _most(self, rows: int) -> int:
        """Returns the most tokens of a step of `rows` rows."""
        return self._budget if rows == 1 else min(self._budget, rows + self._mixed_budget)

    def _share_out(self, tokens: int, rows: list[int], order: Longs, wanted: Longs, counts: Longs) -> None:
        """Adds `tokens` to the counts of one tenant's prefills; `rows` are indices into `order`. Of those of equal
        priority, the shortest remaining is served first, since the mean time to the first token is then shortest; the
        first in running order gets its share in any case, so that short ones cannot keep it waiting."""
        turns = self._batch.turns
        classes: dict[int, list[int]] = {}
        for index in rows:
            classes.setdefault(-turns[order[index]].priority, []).append(index)
        for key in sorted(classes):
            members = classes[key]
            shares = [(members[0], -(-tokens // FIRST_SHARE))]
            shares += [(index, tokens) for index in sorted(members, key=lambda index: int(wanted[index]))]
            for index, most in shares:
                more = min(int(wanted[index] - counts[index]), most, tokens)
                counts[index] += more
                tokens -= more

    def _fit(self, order: Longs, ends: Longs) -> tuple[npt.NDArray[np.int64], Mask]:
        """Returns the units of each group that each row needs to compute up to `ends`, int64 [groups, rows], and which
        rows, served in order, get them, bool [rows]."""
        needs, fits = self._memory.needs(order, ends), np.ones(len(order), np.bool_)
        for pool, wanted in zip(self._memory.pools, needs, strict=True):
            if int(wanted.sum()) > pool.free:
                fits &= (wanted == 0) | (wanted.cumsum() <= pool.free)
        return needs, fits

    def _lacking(self, order: Longs, needs: npt.NDArray[np.int64], fits: Mask) -> Lacking | None:
        """Returns the first turn, excluding drafts, that does not fit."""
        for place in (~fits).nonzero()[0].tolist():
            turn: Turn = self._batch.turns[order[place]]
            if not turn.drafting:
                return Lacking(turn, place, needs[:, : place + 1].sum(axis=1), needs[:, place].copy())
        return None

    def _look_ahead(self, proposal: Proposal, proposer: Proposer) -> None:
        """Adds guesses to decodes where they pay, while the token budget and free units allow. If a row's next input
        token is still being sampled, the guess of that token is left out, since the executor will have the token
        itself."""
        rows, chosen = self._memory.rows, proposal.rows
        ready = rows.samples[chosen] & (rows.expected[chosen] == proposal.starts + 1)
        ready &= (proposal.counts == 1) & self._batch.speculates[chosen]
        tokens = int(proposal.counts.sum())
        most = np.minimum(
            rows.limit[chosen] - proposal.starts - 1, min(self._lookahead, self._most(len(chosen)) - tokens)
        )
        places = (ready & (most > 0)).nonzero()[0]
        if not len(places):
            return
        unknown = (proposal.starts + 1 - rows.known[chosen])[places].tolist()
        limits = [limit + left_out for limit, left_out in zip(most[places].tolist(), unknown, strict=True)]
        sampled = int((rows.samples[chosen] & (proposal.starts + proposal.counts >= rows.expected[chosen])).sum())
        step = NextStep(self.times, len(chosen), tokens, sampled)
        proposed = proposer.propose(self._batch.turns[chosen[places]].tolist(), limits, step)
        if not any(each.tokens for each in proposed):
            return
        guesses = [each.after(left_out) for each, left_out in zip(proposed, unknown, strict=True)]
        chosen_guesses = zip(places.tolist(), guesses, chosen_counts(step, guesses), strict=True)
        self._add_guesses(proposal, {index: each.first(count) for index, each, count in chosen_guesses if count})

    def _add_guesses(self, proposal: Proposal, guesses: dict[int, Guesses]) -> None:
        """Adds guesses, by index in `proposal.rows`, as far as the token budget and free units allow."""
        left = self._most(len(proposal.rows)) - int(proposal.counts.sum())
        spare = (self._memory.free() - proposal.needs.sum(axis=1)).tolist()
        for index, wanted in guesses.items():
            added, turn = wanted.first(left), self._batch.turns[proposal.rows[index]]
            needs = turn.session.memory.turn.lacking(int(proposal.starts[index]) + 1 + len(added.tokens))
            extra = [n - int(had) for n, had in zip(needs, proposal.needs[:, index], strict=True)]
            if added.tokens and all(n <= have for n, have in zip(extra, spare, strict=True)):
                spare = [have - n for n, have in zip(extra, spare, strict=True)]
                left -= len(added.tokens)
                proposal.counts[index] += len(added.tokens)
                proposal.needs[:, index] = needs
                proposal.guesses[index] = added

    def apply(self, proposal: Proposal) -> Flight:
        """Updates every pool and row for the proposal, and makes the plan."""
        memory, rows = self._memory, self._memory.rows
        chosen, starts, counts = proposal.rows, proposal.starts, proposal.counts
        for pool, needs in zip(memory.pools, proposal.needs, strict=True):
            if int(needs.sum()) > pool.free:
                raise InvariantError(f"a plan needs more units of {pool.name} than are free")
        ends = starts + counts
        samples = (rows.samples[chosen] & (ends >= rows.expected[chosen])).astype(np.int32)
        for index, guesses in proposal.guesses.items():
            samples[index] += len(guesses.tokens)
        tokens = self._tokens(proposal)
        updates = self._batch.take_updates()
        moves = self._move(proposal, ends, updates)
        scores, scored = self._score_input(proposal) if self._batch.scoring else (None, ())
        vectors, pooled = self._pool_input(proposal) if self._batch.pooling else (None, ())
        masked = (self._batch.constrained[chosen] & (samples > 0)).nonzero()[0]
        places = (samples.cumsum() - samples)[masked].tolist()
        self._steps += 1
        rows.step[chosen] = self._steps
        rows.scheduled[chosen] = ends
        rows.expected[chosen] += np.minimum(samples, 1)
        if proposal.guesses:
            rows.uncertain[chosen[list(proposal.guesses)]] = True
        self._batch.work[chosen] += counts
        if memory.needs_checkpoints:
            self._batch.marks_due(chosen)
        plan = Plan(
            self._steps,
            chosen.astype(np.int32),
            starts.astype(np.int32),
            counts.astype(np.int32),
            tokens,
            samples,
            tuple(moves.tables),
            tuple(moves.copies),
            tuple(moves.states),
            tuple(updates.sampling.items()),
            scores,
            tuple(TokenMasks(place, Future()) for place in places),
            vectors,
            self._adapters(chosen),
            self.predictor.work(chosen, counts, ends, samples, proposal.guesses) if self.predictor else None,
        )
        return Flight(plan, chosen, rows.run[chosen], proposal.guesses, updates, scored, tuple(masked.tolist()), pooled)

    def _adapters(self, chosen: Longs) -> npt.NDArray[np.int32] | None:
        """Returns the slots of the rows' adapters, `Plan.adapters`."""
        if not self._batch.adapted:
            return None
        slots = self._batch.adapters[chosen]
        return slots if slots.any() else None

    def _score_input(self, proposal: Proposal) -> tuple[InputScores | None, tuple[InputPart, ...]]:
        """Returns the input tokens to score: those whose predecessors this step computes."""
        batch, scored, top = self._batch, [], 0
        offsets: list[int] = []
        targets: list[int] = []
        named: list[tuple[int, ...]] = []
        began = proposal.counts.cumsum() - proposal.counts
        for index, row in enumerate(proposal.rows.tolist()):
            if row not in batch.scoring:
                continue
            turn: Turn = batch.turns[row]
            after = int(proposal.starts[index]) + 1
            start = max(after, turn.next_scored)
            stop = min(after + int(proposal.counts[index]), turn.prompt_length)
            if start < stop:
                first = int(began[index]) + start - after
                offsets += range(first, first + stop - start)
                targets += turn.tokens(start, stop)
                named += [turn.params.logprob_ids] * (stop - start)
                scored.append(InputPart(index, start, stop))
                top = max(top, turn.params.input_logprobs or 0)
        if not scored:
            return None, ()
        scores = InputScores(np.array(offsets, np.int32), np.array(targets, np.int32), top, tuple(named))
        return scores, tuple(scored)

    def _pool_input(self, proposal: Proposal) -> tuple[InputVectors | None, tuple[InputPart, ...]]:
        """Returns the sums of vectors that this step computes."""
        pooled, firsts = list[InputPart](), list[int]()
        began = (proposal.counts.cumsum() - proposal.counts).tolist()
        for index, row in enumerate(proposal.rows.tolist()):
            pool = self._batch.turns[row].pool if row in self._batch.pooling else None
            if pool is None:
                continue
            at = int(proposal.starts[index])
            start, stop = max(at, pool.next), min(at + int(proposal.counts[index]), pool.stop)
            if start < stop:
                pooled.append(InputPart(index, start, stop))
                firsts.append(began[index] + start - at)
        if not pooled:
            return None, ()
        counts = np.array([part.stop - part.start for part in pooled], np.int32)
        return InputVectors(np.array(firsts, np.int32), counts), tuple(pooled)

    def _tokens(self, proposal: Proposal) -> npt.NDArray[np.int32]:
        """Returns the input tokens of the step, `Plan.tokens`."""
        rows, chosen, starts, counts = self._memory.rows, proposal.rows, proposal.starts, proposal.counts
        known = rows.known[chosen]
        last = (counts == 1) & (starts >= known - 1)
        single = np.where(starts >= known, PREVIOUS_SAMPLE, rows.next_token[chosen]).astype(np.int32)
        if last.all():
            return single
        offsets = counts.cumsum() - counts
        tokens = np.empty(int(counts.sum()), np.int32)
        tokens[offsets[last]] = single[last]
        for index in (~last).nonzero()[0].tolist():
            at, start, count = int(offsets[index]), int(starts[index]), int(counts[index])
            guesses = proposal.guesses.get(index, NO_GUESSES).tokens
            turn: Turn = self._batch.turns[chosen[index]]
            known_part = turn.tokens(start, start + count - len(guesses)) or [PREVIOUS_SAMPLE]
            tokens[at : at + count] = [*known_part, *guesses]
        return tokens

    def _move(self, proposal: Proposal, ends: Longs, updates: RowUpdates) -> MemoryChanges:
        """Acquires the units that the step needs, makes every group continue in the units that the step writes, and
        returns the changes for the executor."""
        turns, growing = self._batch.turns, np.flatnonzero(proposal.needs.any(axis=0)).tolist()
        grown = self._memory.grow([(turns[proposal.rows[i]].session.memory.tables, int(ends[i])) for i in growing])
        uncertain = np.zeros(len(proposal.rows), np.int64)
        for index in proposal.guesses:
            uncertain[index] = proposal.counts[index]
        moves = self._memory.advance(proposal.rows, proposal.starts, uncertain, [*updates.taken, *grown])
        for row in moves.left:
            turns[row].session.memory.turn.left_checkpoint()
        return moves
