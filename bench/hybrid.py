"""Sessions on models with recurrent state: `python -m bench.hybrid [MODEL]`.

Measures the gain from reserving state slots for a whole admission pass in one call. Then runs a session of 300 turns,
on a model or on the witness: it compares late with early turns, counts the tokens that rewinds compute again, and
measures the session's memory at rest. Its last turns alternate with the first turns of another session, so that both
run under the same conditions. On a busy machine, threads that wait for each other blur this; `taskset -c 0` leaves one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from bench.spread import Spread, repeated
from tenuto.base.clock import SystemClock
from tenuto.base.config import EngineConfig, cache_dir
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.base.options import TurnParams
from tenuto.base.plan import Executor
from tenuto.engine.engine import Engine
from tenuto.engine.thread.views import held
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.witness import WitnessExecutor
from tenuto.kernels.native.library import OpKind
from tenuto.memory.memory import Memory
from tenuto.memory.pool import HolderKind, Lease
from tenuto.memory.shape import Shape
from tenuto.models.store import resolve

PAGE = 32
PASS = 256
"""Turns per admission pass."""
TURNS, GIVEN, SAID = 300, 24, 16
INTERVAL = 512
REWINDS = (1, 10, 100)
COMPARED = 10
"""Turns compared at each end."""
SLOTS = 2 * (TURNS + COMPARED) + 40
"""State slots: each turn leaves a checkpoint at the end of its input and one at its own end."""


class _Admission:
    holder_kind: HolderKind = "admission"
    holder_name = "admission"

    def leases(self) -> list[Lease]:
        return []


def reservations() -> tuple[Spread, Spread]:
    """Returns the microseconds to reserve slots for `PASS` turns and give each its own: in one call, and in one call
    per turn."""
    spec = MemorySpec(PAGE, (GroupSpec(Kind.FULL, 1), GroupSpec(Kind.SLIDING, 1, 256), GroupSpec(Kind.STATE, 1)))
    config = EngineConfig(context_length=1024, max_running=PASS, token_budget=2 * PASS)
    memory = Memory(spec, (PASS * 66, PASS * 66, PASS * 4), Shape.of(config, PAGE))
    holder = _Admission()
    need = np.array([0, 0, 2], np.int64)

    def timed(passes: Sequence[int]) -> float:
        given: list[tuple[Lease, ...]] = []
        began = time.perf_counter()
        for turns in passes:
            with memory.reserve(turns, holder) as reserved:
                given += [reserved.take(need) for _ in range(turns)]
        seconds = time.perf_counter() - began
        for leases in given:
            for lease in leases:
                lease.release()
        return 1e6 * seconds

    return repeated(lambda: timed([PASS]), 50), repeated(lambda: timed([1] * PASS), 50)


class Cost(NamedTuple):
    """The cost of a turn: seconds, those spent in attention, CPU seconds of the engine's own thread, which does
    everything but the model, and tokens computed."""

    seconds: float
    attention: float
    engine: float
    computed: int

    @property
    def rest(self) -> float:
        return self.seconds - self.attention


@dataclass
class Conversation:
    """Runs turns of sessions on an engine."""

    engine: Engine
    executor: Executor

    def turn(self, session: str, rng: Random) -> Cost:
        """Runs a turn of `GIVEN` random tokens and returns its cost."""
        forward = self.executor.forward if isinstance(self.executor, ModelExecutor) else None
        native = forward if isinstance(forward, NativeForward) else None
        if native is not None:
            native.op_seconds[:] = 0
        began, worked = time.perf_counter(), time.thread_time()
        tokens = [rng.randrange(20, 200) for _ in range(GIVEN)]
        turn = self.engine.turns.submit(session, tokens, TurnParams(max_new_tokens=SAID, ignore_eos=True))
        while not self.engine.idle:
            self.engine.step()
        attention = float(native.op_seconds[OpKind.ATTEND]) if native is not None else 0.0
        return Cost(time.perf_counter() - began, attention, time.thread_time() - worked, turn.computed_tokens)


def executor_of(model: str | None) -> Executor:
    """Returns an executor of `model`, or a witness with a group of each kind."""
    if model is not None:
        return load_executor(resolve(model, cache_dir()), ExecutorOptions(PAGE, cache=cache_dir(), say=print))
    groups = (GroupSpec(Kind.FULL, 1), GroupSpec(Kind.SLIDING, 1, 256), GroupSpec(Kind.STATE, 1))
    return WitnessExecutor(PAGE, groups, 256, verify=False)


def conversation(executor: Executor) -> None:
    """Prints the costs of a long session's turns and rewinds."""
    context = TURNS * (GIVEN + SAID) + 1000
    config = EngineConfig(context_length=context, checkpoint_interval=INTERVAL, checkpoint_share=0.9, audit_every=0)
    units = tuple(SLOTS if group.kind is Kind.STATE else 2 * context // PAGE for group in executor.spec.groups)
    engine = Engine(executor, units, config, vocab_size=256, eos_ids=(), clock=SystemClock(), random=Random(0))
    running, rng = Conversation(engine, executor), Random(1)
    engine.sessions.open("long")
    engine.sessions.open("new")
    for _ in range(TURNS - COMPARED):
        running.turn("long", rng)
    running.turn("new", rng)  # the very first has no history
    pairs = [(running.turn("new", rng), running.turn("long", rng)) for _ in range(COMPARED)]
    first, last = zip(*pairs, strict=True)
    tokens = engine.registry.get("long").records[-1].end
    print(f"{TURNS} turns of {GIVEN} tokens in and {SAID} out, {tokens} tokens in all")
    for name, part in ((f"first {COMPARED}", first), (f"last {COMPARED}", last)):
        whole, attention, own = (1e3 * statistics.median(turn[i] for turn in part) for i in range(3))
        computed = statistics.median(turn.computed for turn in part)
        print(
            f"{name:>9}: {whole:8.2f} ms a turn, {attention:7.2f} in attention, {own:6.2f} of CPU in the engine; "
            f"{computed:g} tokens computed"
        )
    costs = [sorted(turn.rest for turn in part) for part in (first, last)]
    median, quick = (costs[1][i] / costs[0][i] for i in (COMPARED // 2, COMPARED // 5))
    engines = [statistics.median(turn.engine for turn in part) for part in (first, last)]
    print(
        f"last over first, without attention: {median:.2f}, {quick:.2f} without the slower 80% of the turns; "
        f"the engine's own CPU {engines[1] / engines[0]:.2f}"
    )
    for back in REWINDS:
        child = f"back {back}"
        fork = engine.sessions.fork("long", child=child)
        position = fork.records[TURNS - back - 1].end + GIVEN // 2
        engine.sessions.rewind(child, position=position)
        cost = running.turn(child, rng)
        print(
            f"rewind by {back} turns, into an input: {cost.computed - GIVEN - SAID} tokens computed again "
            f"(spacing {INTERVAL}), turn of {1e3 * cost.seconds:.1f} ms"
        )
        engine.sessions.close(child)
    at_rest(engine, "long")


def at_rest(engine: Engine, session: str) -> None:
    """Prints the bytes that a session holds between turns, without optional checkpoints, and the bytes expected from
    the model's specification."""
    while engine.memory.cache.evict():
        pass
    spec, kept = engine.memory.spec, engine.registry.get(session)
    computed, (units, _) = kept.memory.computed, held(engine, kept)
    expected = 0
    for group in spec.groups:
        pages = -(-computed // spec.page_size)
        passed = max(0, computed - group.window + 1) // spec.page_size if group.window else 0
        expected += group.bytes_per_unit * (1 if group.kind is Kind.STATE else pages - passed)
    names = zip(engine.memory.pools, spec.groups, strict=True)
    taken = sum(units[pool.name] * group.bytes_per_unit for pool, group in names)
    print(f"at rest with {computed} tokens computed: {taken:,} bytes; by the specification {expected:,}")


def main() -> None:
    """Prints the figures of reservations and of a long session."""
    parser = argparse.ArgumentParser(prog="python -m bench.hybrid", description=__doc__)
    parser.add_argument("model", nargs="?", help="such as tests/hybrid/model; by default the witness")
    arguments = parser.parse_args()
    together, singly = reservations()
    print(f"state slots for {PASS} turns, us: in one call {together.shown()}, in {PASS} {singly.shown()}")
    print(f"one call takes {together.median / singly.median:.2f} of the time\n")
    executor = executor_of(arguments.model)
    conversation(executor)
    executor.close()


if __name__ == "__main__":
    main()
