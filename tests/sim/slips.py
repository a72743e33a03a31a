"""Small slips planted all over the core, one at a time: a wrong sign, a wrong bound, a forgotten update.

Each replaces a piece of a module's source. A slip must be adapted when its source changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tenuto
from tests.sim.rewritten import rewrite


@dataclass(frozen=True)
class Slip:
    """Replaces the first `old` in `module` with `new`."""

    module: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.module}: {self.old.strip()}  ->  {self.new.strip() or 'nothing'}"

    @property
    def path(self) -> Path:
        """The file that the slip changes."""
        return Path(tenuto.__file__).parent / f"{self.module.replace('.', '/')}.py"

    def plant(self) -> None:
        """Plants the slip until the process ends."""
        rewrite(f"tenuto.{self.module}", self._slip)

    def _slip(self, source: str) -> str:
        if self.old not in source:
            raise ValueError(f"the source of this slip is gone: {self}")
        return source.replace(self.old, self.new, 1)


SLIPS = (
    Slip("memory.kinds.full", "self.base.truncate(pages_for(position, self", "self.base.truncate(pages_for(position + 1, self"),
    Slip("memory.kinds.sliding", "max(0, position - self.window + 1)", "max(0, position - self.window + 2)"),
    Slip("memory.kinds.paged", "position % self.page_size >= self.pool", "position % self.page_size + 1 >= self.pool"),
    Slip("memory.pool", "max(self.floors[units[-1]], last)", "max(self.floors[units[-1]], last - 1)"),
    Slip("memory.pool", "return (position - 1) % self.slots + 1", "return (position - 1) % self.slots"),
    Slip("memory.pool", "            self.floors[unit] = 0\n", ""),
    Slip("memory.kinds.paged", "else start % self.page_size\n", "else max(0, start % self.page_size - 1)\n"),
    Slip("memory.kinds.sliding", "self.first - self.released\n", "self.first - self.released + 1\n"),
    Slip("memory.kinds.sliding", "low, high = self.first_entry(position)", "low, high = self.first_entry(position + 1)"),
    Slip("memory.kinds.sliding", "self.first, self.released, self._copy_slots = pages", "self.first, _, self._copy_slots = pages"),
    Slip("memory.kinds.state", "if slot not in self.opened.units else", "if slot in self.opened.units else"),
    Slip("memory.turn_memory", "session.checkpoints.cut(self.start + 1)", "session.checkpoints.cut(self.start)"),
    Slip("memory.turn_memory", "if live > began:", "if live >= began:"),
    Slip("memory.turn_memory", "self.checkpoints.cut(position + 1)", "self.checkpoints.cut(position)"),
    Slip("memory.committed", "self.checkpoints.from_on(target)", "self.checkpoints.from_on(target + 1)"),
    Slip("memory.committed", "self.checkpoints.cut(position)", "self.checkpoints.cut(position + 1)"),
    Slip("memory.committed", "min(target, self.computed)", "target"),
    Slip("memory.checkpoints.cache", "self._evict(heads[0])", "self._evict(heads[-1])"),
    Slip("memory.checkpoints.thinning", "max(checkpoint.needed_at, checkpoint.reached)", "checkpoint.reached"),
    Slip("memory.checkpoints.thinning", "below.branches += checkpoint.branches - 1", "below.branches += checkpoint.branches"),
    Slip("memory.kinds.full", "self.pool.capacity * self.page_size + 1", "self.pool.capacity * self.page_size"),
    Slip("memory.rows", "self.mark[row] = FAR\n        self._free", "self._free"),
    Slip("session.turn", "self.arrival - self.priority *", "self.arrival + self.priority *"),
    Slip("session.turn", "* aging_seconds, self.number", "* aging_seconds, -self.number"),
    Slip("sched.batch", "turn.last_position if generates", "turn.last_position + 1 if generates"),
    Slip("sched.batch", "        self.stop_ids[row] = NO_STOP\n", ""),
    Slip("sched.batch", "        self._sampling.pop(row, None)\n", ""),
    Slip("sched.batch", "        self.scoring.discard(row)\n", ""),
    Slip("sched.batch", "self._taken = [growth for growth in self._taken if growth.row != row]", "pass"),
    Slip("sched.batch", "if len(turn.output) < params.min_new_tokens", "if len(turn.output) <= params.min_new_tokens"),
    Slip("sched.batch", "turn.prompt_length + params.min_new_tokens\n", "turn.prompt_length + params.min_new_tokens - 1\n"),
    Slip("sched.batch", "spaced = (position // interval + 1) * interval", "spaced = (position // interval + 1) * interval + 1"),
    Slip("sched.batch", "memory.begin(turn.name, turn.begins_at, slots)", "memory.begin(turn.name, turn.prompt_length, slots)"),
    Slip("sched.settle", "stopped[index] = not stuck and", "stopped[index] ="),
    Slip("sched.settle", "            complete, stuck = self._follow(turn)\n", "            complete, stuck = (False, False) if stopped else self._follow(turn)\n"),
    Slip("sched.planner", "places = (samples.cumsum() - samples)[masked]", "places = (samples.cumsum() - 1)[masked]"),
    Slip("engine.flights", "flight.guesses.get(index, NO_GUESSES).tokens", "()"),
    Slip("engine.flights", "        if len(self._flights) == 1:\n            self._ask_masks()", "        self._ask_masks()"),
    Slip("text.constraint", "            self._next = None\n", ""),
    Slip("text.constraint", "if not ahead.consume(guess) or ahead.complete:", "if ahead.complete:"),
    Slip("text.constraint", "ahead = self._matcher.copy()", "ahead = self._matcher"),
    Slip("sched.settle", "flight.plan.starts[index]) + 1 + accepted)", "flight.plan.starts[index]) + 2 + accepted)"),
    Slip("sched.settle", "rows.next_token[row] = sampled[accepted]", "rows.next_token[row] = sampled[0]"),
    Slip("sched.settle", "full = rows.known[chosen] > rows", "full = rows.known[chosen] >= rows"),
    Slip("sched.settle", 'side="right"', 'side="left"'),
    Slip("sched.settle", "            at += part.stop - part.start", "                at += part.stop - part.start"),
    Slip("sched.settle", "settled.ended.append((turn, EndReason.STOP))\n                return", "settled.ended.append((turn, EndReason.STOP))\n                break"),
    Slip("sched.planner", "min(after + int(proposal.counts[index]), turn.prompt_length)", "min(after + int(proposal.counts[index]), turn.prompt_length - 1)"),
    Slip("sched.planner", "setdefault(-turns[order[index]].priority", "setdefault(turns[order[index]].priority"),
    Slip("sched.planner", "            rows.uncertain[chosen[list(proposal.guesses)]] = True\n", "            pass\n"),
    Slip("sched.admission", "ends = np.minimum(rows.expected[order] + ahead, rows.limit[order])", "ends = rows.scheduled[order]"),
    Slip("sched.pressure", "sorted(self._rungs):\n            for session", "sorted(self._rungs, reverse=True):\n            for session"),
    Slip("engine.gate", "return room if wanted is None", "return room - 1 if wanted is None"),
    Slip("engine.timers", "timer is Timer.TOTAL or not turn.started", "not turn.started"),
    Slip("engine.lifecycle", "turn.changed = self._clock.now()", "pass"),
    Slip("engine.lifecycle", "if a != b), min(len(old), len(new)))", "if a != b), min(len(old), len(new))) + 1"),
    Slip("engine.lifecycle", "        self._queue.remove(turn)\n        self._outcomes.ended.append", "        self._outcomes.ended.append"),
    Slip("engine.lifecycle", "        if turn.cached < 0:\n", "        if True:\n"),
    Slip("session.registry", "session.last_turn_end + ttl <= now", "ttl <= now"),
    Slip("session.registry", " and session.key not in self._watched:", ":"),
    Slip("session.tenants", "self.tokens -= session.counted", "self.tokens -= 0 * session.counted"),
    Slip("session.records", "min(last.input_end, position)", "last.input_end"),
    Slip("session.turn", "self.params, self.arrival = params, now", "self.params = params"),
    Slip("session.turn", "max(1, self.base_length) + len(self.input_scores)", "max(1, self.base_length + 1) + len(self.input_scores)"),
    Slip("text.stream", "self._ends[0][0] <= self._delivered", "self._ends[0][0] < self._delivered"),
    Slip("text.stream", "if self._tokens <= self._min_tokens", "if self._tokens < self._min_tokens"),
    Slip("memory.pool", "gone = self._limbo[-1] if", "gone = self._limbo[0] if"),
    Slip("memory.checkpoints.cache", "if not checkpoint.references and not checkpoint.evicted:", "if not checkpoint.evicted:"),
    Slip("memory.checkpoints.cache", "if not checkpoint.pins:\n            self.order", "if checkpoint.pins <= 1:\n            self.order"),
    Slip("memory.kinds.full", "self.pool.counts[self.base.units[-1]] == 1", "self.pool.counts[self.base.units[-1]] >= 1"),
    Slip("memory.turn_memory", "position, min(position, self._settled)", "position, self._settled"),
    Slip("memory.turn_memory", "computed[self.row] = max(int(computed[self.row]), position)", "pass"),
    Slip("sched.suspects", "memory.computed >= turn.failed_end", "memory.computed + 1 >= turn.failed_end"),
    Slip("sched.suspects", "memory.scheduled if memory is not None", "memory.computed + 1 if memory is not None"),
    Slip("sched.suspects", "failures += int(alone)", "failures += 1"),
    Slip("sched.shares", "(self._rows[turn.session.policy.tenant] + 1)", "self._rows[turn.session.policy.tenant]"),
    Slip("sched.shares", "weight_left -= weights[tenant]", "pass"),
    Slip("sched.batch", " - 1 / self.shares.weight(turn)", ""),
    Slip("sched.batch", "if growth.row in same] + self._taken", "if growth.row in same]"),
    Slip("sched.batch", "in updates.sampling.items() if row in same} | self._sampling", "in updates.sampling.items() if row in same}"),
    Slip("sched.admission", "self._passes // RECONSIDERED_AFTER", "0"),
    Slip("sched.pressure", "units[~held[group][units]]", "units"),
    Slip("engine.flights", "return flight.plan.step <= self._void", "return flight.plan.step < self._void"),
    Slip("engine.lifecycle", "turn.failed_end = min(turn.failed_end, position + 1)", "pass"),
)  # fmt: skip
