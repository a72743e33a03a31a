"""The engine's own cost of a step, without a model: from planning to settling, including stop ids and hand-over.

The witness stands in for the model and verifies only the slots that the next token depends on; its time is subtracted.
Ratios are those of medians over alternating series of steps in one process, because machines are noisy.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from random import Random

from tenuto.base.clock import SystemClock
from tenuto.base.config import EngineConfig
from tenuto.base.groups import GroupSpec, Kind
from tenuto.base.options import TurnParams
from tenuto.base.plan import Plan, StepResult
from tenuto.base.turns import TurnState
from tenuto.base.views import AuditReport
from tenuto.engine.engine import Engine
from tenuto.exec.witness import WitnessExecutor

VOCAB = 50_000
PAGE_SIZE = 16
STOPS = (2, 7, 11)
NEVER_SAMPLED = (VOCAB, VOCAB + 1, VOCAB + 2)
"""Stop ids that the witness never samples: its vocabulary is smaller than the engine's."""


class TimedWitness(WitnessExecutor):
    """A witness that measures its own time, in nanoseconds."""

    worked = 0

    def submit(self, plan: Plan) -> None:
        began = time.perf_counter_ns()
        super().submit(plan)
        self.worked += time.perf_counter_ns() - began

    def collect(self) -> StepResult:
        began = time.perf_counter_ns()
        result = super().collect()
        self.worked += time.perf_counter_ns() - began
        return result


@dataclass
class Bench:
    """An engine with `running` endless decodes."""

    engine: Engine
    executor: TimedWitness

    def stretch(self, steps: int) -> float:
        """Returns the engine's own microseconds per step, the median over `steps` steps."""
        times = []
        for _ in range(steps):
            inside, began = self.executor.worked, time.perf_counter_ns()
            self.engine.step()
            times.append(time.perf_counter_ns() - began - (self.executor.worked - inside))
        return statistics.median(times) / 1000

    def longest(self, steps: int) -> float:
        """Returns the milliseconds of CPU time of the longest of `steps` steps."""
        longest = 0
        for _ in range(steps):
            began = time.thread_time_ns()
            self.engine.step()
            longest = max(longest, time.thread_time_ns() - began)
        return longest / 1e6

    def audited(self) -> tuple[float, int, float]:
        """Runs an audit spread over steps, and a recount at once. Returns the audit's longest step in milliseconds, its
        number of steps, and the milliseconds of the recount."""
        told: list[AuditReport] = []
        self.engine.ask_audit(told.append)
        longest, steps = 0.0, 0
        while not told:
            longest, steps = max(longest, self.longest(1)), steps + 1
        began = time.thread_time_ns()
        self.engine.audit()
        return longest, steps, (time.thread_time_ns() - began) / 1e6

    def counted(self, steps: int) -> tuple[float, ...]:
        """Returns the units touched, rows considered and turns settled per step."""
        before = self.engine.counted_work
        for _ in range(steps):
            self.engine.step()
        return tuple((b - a) / steps for a, b in zip(before, self.engine.counted_work, strict=True))


def make(
    running: int,
    *,
    parked: int = 10,
    history: int = 1000,
    kinds: tuple[Kind, ...] = (Kind.FULL,),
    overlap: int = 0,
    host_tier: int = 0,
) -> Bench:
    """Builds an engine with `running` decodes on sessions of `history` tokens each, and `parked` idle sessions of 32
    tokens."""
    groups = tuple(GroupSpec(kind, 1, 256 if kind is Kind.SLIDING else 0) for kind in kinds)
    executor = TimedWitness(PAGE_SIZE, groups, VOCAB, verify=False)
    context = history + 20_000
    config = EngineConfig(
        context_length=context,
        max_running=max(running, 256),
        token_budget=max(running, 256) * 64,
        mixed_budget=max(running, 256) * 64,
        overlap=overlap,
        audit_every=0,
        max_queued=100_000,
        max_sessions=100_000,
        checkpoint_share=0.5,
        host_tier=host_tier,
    )
    pages = (context // PAGE_SIZE + 2) * max(running, 1) + parked * 4 + 64
    units = tuple(pages if kind is not Kind.STATE else 8 * running + 2 * parked + 64 for kind in kinds)
    engine = Engine(executor, units, config, vocab_size=VOCAB + 3, eos_ids=STOPS, clock=SystemClock(), random=Random(0))
    rng = Random(1)
    for number in range(parked):
        engine.sessions.open(f"parked {number}")
        engine.turns.submit(
            f"parked {number}", [rng.randrange(20, VOCAB) for _ in range(32)], TurnParams(max_new_tokens=0)
        )
    run_until_idle(engine)
    turns = []
    for number in range(running):
        engine.sessions.open(f"running {number}")
        tokens = [rng.randrange(20, VOCAB) for _ in range(history)]
        turns.append(
            engine.turns.submit(f"running {number}", tokens, TurnParams(stop_ids=NEVER_SAMPLED, ignore_eos=True))
        )
    while not all(turn.output for turn in turns):
        engine.step()
    assert all(turn.state is TurnState.RUNNING for turn in turns)
    return Bench(engine, executor)


def run_until_idle(engine: Engine) -> None:
    """Runs steps until the engine is idle."""
    while not engine.idle:
        engine.step()


def ratio(a: Bench, b: Bench, rounds: int = 9, steps: int = 200) -> tuple[float, float, float]:
    """Returns the medians of alternating series of `a` and `b`, in microseconds per step, and the median ratio b / a of
    pairs."""
    pairs = [(a.stretch(steps), b.stretch(steps)) for _ in range(rounds)]
    return (
        statistics.median(x for x, _ in pairs),
        statistics.median(y for _, y in pairs),
        statistics.median(y / x for x, y in pairs),
    )


def main() -> None:
    """Prints the table."""
    print("The engine's own cost of a step, without a model (witness time taken off)")
    print(f"{'running decodes':<44}{'us a step':>12}{'us a turn':>12}")
    for kinds in ((Kind.FULL,), (Kind.FULL, Kind.SLIDING, Kind.STATE)):
        for overlap in (0, 1):
            for running in (1, 16, 256):
                bench = make(running, kinds=kinds, overlap=overlap)
                bench.stretch(50)
                cost = statistics.median(bench.stretch(150) for _ in range(5))
                label = f"{running} ({'+'.join(k.value for k in kinds)}, overlap {overlap})"
                print(f"{label:<44}{cost:>12.1f}{cost / running:>12.2f}")
    print(f"\n{'the same work beside more':<44}{'us a step':>12}{'us a step':>12}{'ratio':>8}   counted work a step")
    for label, one, other in (
        ("16 running, 10 and 10,000 parked sessions", make(16, parked=10), make(16, parked=10_000)),
        ("16 running, 1,000 and 100,000 tokens", make(16, history=1000), make(16, history=100_000)),
    ):
        one.stretch(50)
        other.stretch(50)
        low, high, by_pair = ratio(one, other)
        equal = one.counted(160), other.counted(160)
        print(f"{label:<44}{low:>12.1f}{high:>12.1f}{by_pair:>8.3f}   {equal[0]} and {equal[1]}")
    parked = make(16, parked=50_000)
    plain = parked.longest(200)
    longest, steps, at_once = min(parked.audited() for _ in range(5))
    print(f"\n{'16 running, 50,000 parked sessions':<44}{'longest step, ms':>18}")
    print(f"{'not audited':<44}{plain:>18.1f}\n{f'audited over {steps} steps':<44}{longest:>18.1f}")
    print(f"{'recounted at one go':<44}{at_once:>18.1f}")


if __name__ == "__main__":
    main()
