"""Sessions on models with recurrent state: `python -m bench.hybrid [MODEL]`.

What it saves to reserve state slots for a whole admission pass in one call; and a session of 300 turns, on a model or,
without one, on the witness: whether late turns cost more than early ones, and what rewinds compute again.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from bench.spread import Spread, repeated
from tenuto.base.clock import SystemClock
from tenuto.base.config import EngineConfig, cache_dir
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.base.options import TurnParams
from tenuto.base.plan import Executor
from tenuto.engine.engine import Engine
from tenuto.exec.load import load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.witness import WitnessExecutor
from tenuto.kernels.native.library import OpKind
from tenuto.memory.memory import Memory
from tenuto.memory.pool import HolderKind, Lease
from tenuto.memory.shape import Shape
from tenuto.models.store import resolve

PAGE = 16
PASS = 256
"""Turns of an admission pass."""
TURNS, GIVEN, SAID = 300, 24, 16
INTERVAL = 512
REWINDS = (1, 10, 100)
SLOTS = 2 * TURNS + 40
"""Each turn leaves a checkpoint at the end of its input and one at its own."""


class _Admission:
    holder_kind: HolderKind = "admission"
    holder_name = "admission"

    def leases(self) -> list[Lease]:
        return []


def reservations() -> tuple[Spread, Spread]:
    """Microseconds to reserve slots for `PASS` turns and hand each its own: in one call, and in one call a turn."""
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


@dataclass
class Conversation:
    """A session on an engine."""

    engine: Engine
    executor: Executor

    def turn(self, session: str, rng: Random) -> tuple[float, float, int]:
        """Seconds of a turn, those of them that attention took, and the tokens it computed."""
        forward = self.executor.forward if isinstance(self.executor, ModelExecutor) else None
        native = forward if isinstance(forward, NativeForward) else None
        if native is not None:
            native.op_seconds[:] = 0
        began = time.perf_counter()
        tokens = [rng.randrange(20, 200) for _ in range(GIVEN)]
        turn = self.engine.submit(session, tokens, TurnParams(max_new_tokens=SAID, ignore_eos=True))
        while not self.engine.idle:
            self.engine.step()
        attention = float(native.op_seconds[OpKind.ATTEND]) if native is not None else 0.0
        return time.perf_counter() - began, attention, turn.computed_tokens


def executor_of(model: str | None) -> Executor:
    """A model's, or a witness with a group of each kind."""
    if model is not None:
        return load_executor(resolve(model, cache_dir()), PAGE, cache=cache_dir(), say=print)
    groups = (GroupSpec(Kind.FULL, 1), GroupSpec(Kind.SLIDING, 1, 256), GroupSpec(Kind.STATE, 1))
    return WitnessExecutor(PAGE, groups, 256, verify=False)


def conversation(executor: Executor) -> None:
    """Print what the turns of a long session cost, and its rewinds."""
    context = TURNS * (GIVEN + SAID) + 1000
    config = EngineConfig(context_length=context, checkpoint_interval=INTERVAL, checkpoint_share=0.9, audit_every=0)
    units = tuple(SLOTS if group.kind is Kind.STATE else 2 * context // PAGE for group in executor.spec.groups)
    engine = Engine(executor, units, config, vocab_size=256, eos_ids=(), clock=SystemClock(), random=Random(0))
    running, rng = Conversation(engine, executor), Random(1)
    engine.open("long")
    turns = [running.turn("long", rng) for _ in range(TURNS)]
    first, last = turns[1:11], turns[-10:]  # the very first also warms up
    tokens = engine.sessions.get("long").records[-1].end
    print(f"{TURNS} turns of {GIVEN} tokens in and {SAID} out, {tokens} tokens in all")
    for name, part in (("first 10", first), ("last 10", last)):
        whole, attention = (1e3 * statistics.median(turn[i] for turn in part) for i in (0, 1))
        computed = statistics.median(turn[2] for turn in part)
        print(f"{name:>9}: {whole:8.2f} ms a turn, {attention:7.2f} in attention, {computed:g} tokens computed")
    costs = [statistics.median(turn[0] - turn[1] for turn in part) for part in (first, last)]
    print(f"last over first, without attention: {costs[1] / costs[0]:.2f}")
    for back in REWINDS:
        child = f"back {back}"
        fork = engine.fork("long", child=child)
        position = fork.records[TURNS - back - 1].end + GIVEN // 2
        engine.rewind(child, position=position)
        seconds, _, computed = running.turn(child, rng)
        print(
            f"rewind by {back} turns, into an input: {computed - GIVEN - SAID} tokens computed again "
            f"(spacing {INTERVAL}), turn of {1e3 * seconds:.1f} ms"
        )
        engine.close(child)


def main() -> None:
    """Print both."""
    together, singly = reservations()
    print(f"state slots for {PASS} turns, us: in one call {together.shown()}, in {PASS} {singly.shown()}")
    print(f"one call takes {together.median / singly.median:.2f} of the time\n")
    executor = executor_of(sys.argv[1] if len(sys.argv) > 1 else None)
    conversation(executor)
    executor.close()


if __name__ == "__main__":
    main()
