"""Settling of a step: appends sampled tokens to the output and finds turns that end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Logprobs, Singles, StepResult
from tenuto.base.turns import EndReason
from tenuto.memory.kinds.group import Mask
from tenuto.memory.memory import Memory
from tenuto.sched.batch import Batch
from tenuto.sched.predictor import Predictor
from tenuto.sched.proposal import Flight
from tenuto.session.turn import Turn


@dataclass(slots=True)
class Settled:
    """The outcome of a step: turns with new output, turns that end with the reason, and prefill-only turns that are
    fully computed. `stuck`: turns whose text is incomplete although their grammar allows no further token. `sampled`:
    the number of tokens that became output."""

    sampled: int = 0
    progressed: list[Turn] = field(default_factory=list)
    stuck: list[Turn] = field(default_factory=list)
    ended: list[tuple[Turn, EndReason]] = field(default_factory=list)
    prefilled: list[Turn] = field(default_factory=list)


class Settler:
    """Settles steps: advances `computed` and `known` of their rows (see `Rows`), and appends what they sampled."""

    def __init__(self, memory: Memory, batch: Batch, predictor: Predictor | None = None) -> None:
        self._memory, self._predictor = memory, predictor
        self._batch = batch
        self.turns_settled = 0  # in total: a measure of work
        self.guessed = Counter[str]()  # guesses computed, by source
        self.accepted = Counter[str]()  # those of them that became output

    def settle(self, flight: Flight, result: StepResult) -> Settled:
        """Settles a step. Drops the results of rows that their turns have left since the plan was applied."""
        rows, batch, settled = self._memory.rows, self._batch, Settled()
        live = rows.run[flight.rows] == flight.runs
        chosen, samples = flight.rows, flight.plan.samples
        ends = flight.plan.starts.astype(np.int64) + flight.plan.counts
        self.turns_settled += len(chosen)
        if live.all():
            rows.computed[chosen] = ends
        else:
            rows.computed[chosen[live]] = ends[live]
        self._take_outputs(flight, result, live & (samples == 1), settled)
        for index in flight.guesses:
            if live[index]:
                self._take_lookahead(flight, result, index, settled)
        if result.predicted is not None and self._predictor is not None:
            self._predictor.take(chosen, result.predicted, live)
        if result.sampled is not None:
            self._take_logprobs(flight, result, result.sampled, live)
        if result.scored is not None:
            self._take_scores(flight, result.scored, live)
        if result.vectors is not None:
            self._take_vectors(flight, result.vectors, live)
        self._memory.slide(chosen[live])
        idle = live & ~rows.samples[chosen] & (ends >= rows.limit[chosen])
        settled.prefilled = batch.turns[chosen[idle]].tolist()
        for turn in batch.take_left(flight.plan.step):
            self._settle_left(turn, settled)
        return settled

    def _settle_left(self, turn: Turn, settled: Settled) -> None:
        """Settles a turn that left its row while this step was computing it; it may have another row by now."""
        rows, memory = self._memory.rows, turn.session.memory.turn
        if memory is None:
            raise InvariantError(f"{turn.name} relies on a step and has no memory")
        memory.settle()
        if memory.row >= 0 and not rows.samples[memory.row] and rows.computed[memory.row] >= rows.limit[memory.row]:
            settled.prefilled.append(turn)

    def _take_outputs(self, flight: Flight, result: StepResult, sampled: Mask, settled: Settled) -> None:
        """Appends the tokens of rows that sampled one token each, and finds turns that end or are stuck."""
        rows, batch = self._memory.rows, self._batch
        offsets = flight.plan.samples.cumsum() - 1
        if sampled.all():
            chosen = flight.rows
            tokens = result.tokens[offsets] if len(offsets) != len(result.tokens) else result.tokens
        else:
            chosen, tokens = flight.rows[sampled], result.tokens[offsets[sampled]]
        if not len(chosen):
            return
        rows.known[chosen] += 1
        rows.next_token[chosen] = tokens
        turns: list[Turn] = batch.turns[chosen].tolist()
        for turn, token in zip(turns, tokens.tolist(), strict=True):
            turn.output.append(token)
        settled.progressed = turns
        settled.sampled = len(turns)
        stopped = (batch.stop_ids[chosen] == tokens[:, None]).any(axis=1)
        for index in batch.has_text[chosen].nonzero()[0].tolist():
            text = turns[index].text
            if text is not None and text.push(turns[index].output[-1]):
                stopped[index] = True
        full = rows.known[chosen] > rows.limit[chosen]
        for index in batch.constrained[chosen].nonzero()[0].tolist():
            complete, stuck = self._follow(turns[index])
            stopped[index] = not stuck and (stopped[index] or complete)
            if stuck:
                settled.stuck.append(turns[index])
                full[index] = False
        for index in (stopped | full).nonzero()[0].tolist():
            if stopped[index]:
                turns[index].stop = self._stop_of(turns[index], int(chosen[index]))
            settled.ended.append((turns[index], EndReason.STOP if stopped[index] else EndReason.LENGTH))

    @staticmethod
    def _follow(turn: Turn) -> tuple[bool, bool]:
        """Pushes the turn's last output token to its grammar, if it has one. Returns whether the text is complete and
        whether the turn is stuck. A stop token that the grammar does not allow makes it stuck, too: where no token is
        allowed, an arbitrary one is sampled."""
        constraint = turn.constraint
        if constraint is None:
            return False, False
        complete = constraint.push(turn.output[-1])
        return complete, bool(constraint.failure)

    def _stop_of(self, turn: Turn, row: int) -> str | int | None:
        """Returns the stop id, stop string or stop pattern that the turn's last output token completed."""
        token = turn.output[-1]
        if (self._batch.stop_ids[row] == token).any():
            return token
        return turn.text.stop if turn.text is not None else None

    def _take_lookahead(self, flight: Flight, result: StepResult, index: int, settled: Settled) -> None:
        """Settles a row with lookahead: tokens sampled after correct guesses are output, too."""
        rows, batch = self._memory.rows, self._batch
        row, guessed = int(flight.rows[index]), flight.guesses[index]
        guesses = guessed.tokens
        stop = int(flight.plan.samples[: index + 1].sum())
        sampled = result.tokens[stop - len(guesses) - 1 : stop].tolist()
        accepted = 0
        while accepted < len(guesses) and guesses[accepted] == sampled[accepted]:
            accepted += 1
        rows.uncertain[row] = False
        if accepted < len(guesses):
            self._memory.reject(row, int(flight.plan.starts[index]) + 1 + accepted)
        turn: Turn = batch.turns[row]
        rows.known[row] += accepted + 1
        rows.expected[row] = rows.known[row]
        rows.next_token[row] = sampled[accepted]
        settled.progressed.append(turn)
        turn.guessed += len(guesses)
        self.guessed[guessed.source] += len(guesses)
        for place, token in enumerate(sampled[: accepted + 1]):
            turn.output.append(token)
            settled.sampled += 1
            if place < accepted:
                turn.accepted += 1
                self.accepted[guessed.source] += 1
            stopped = bool((batch.stop_ids[row] == token).any())
            if turn.text is not None and turn.text.push(token):
                stopped = True
            complete, stuck = self._follow(turn)
            if stuck:
                settled.stuck.append(turn)
                return
            if stopped or complete:
                turn.stop = self._stop_of(turn, row)
                settled.ended.append((turn, EndReason.STOP))
                return
        if rows.known[row] > rows.limit[row]:
            settled.ended.append((turn, EndReason.LENGTH))

    def _take_logprobs(self, flight: Flight, result: StepResult, sampled: Logprobs, live: Mask) -> None:
        """Records the log-probabilities of sampled tokens that became output."""
        owners = np.searchsorted(flight.plan.samples.cumsum(), sampled.places, side="right")
        tokens = result.tokens[sampled.places].tolist()
        for entry, index in enumerate(owners.tolist()):
            turn: Turn | None = self._batch.turns[flight.rows[index]] if live[index] else None
            if turn is not None and len(turn.output_logprobs) < len(turn.output):
                params = turn.params
                drawn = tokens[entry : entry + 1]
                turn.output_logprobs += sampled.entries(entry, drawn, params.logprobs or 0, params.logprob_ids)

    def _take_scores(self, flight: Flight, scores: Logprobs, live: Mask) -> None:
        """Records the log-probabilities of input tokens."""
        at = 0
        for part in flight.scored:
            if live[part.index]:
                row = int(flight.rows[part.index])
                turn: Turn = self._batch.turns[row]
                if part.start != turn.next_scored:
                    raise InvariantError(
                        f"{turn.name} gets scores from position {part.start}; expected: {turn.next_scored}"
                    )
                tokens = turn.tokens(part.start, part.stop)
                params = turn.params
                turn.input_scores += scores.entries(at, tokens, params.input_logprobs or 0, params.logprob_ids)
                if part.stop == turn.prompt_length:
                    self._batch.scoring.discard(row)
            at += part.stop - part.start

    def _take_vectors(self, flight: Flight, vectors: Singles, live: Mask) -> None:
        """Adds the sums of vectors, float32 [sums, width], to those of their turns."""
        for part, vector in zip(flight.pooled, vectors, strict=True):
            row = int(flight.rows[part.index])
            pool = self._batch.turns[row].pool if live[part.index] else None
            if pool is not None:
                pool.add(part.start, part.stop, vector)
                if pool.complete:
                    self._batch.pooling.discard(row)
