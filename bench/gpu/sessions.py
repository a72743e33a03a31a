"""Sessions of a real engine on a GPU, beside what the device makes of their prompts and decodes alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from bench.gpu.models import HALF, PAGE, Eager, Rows, executor
from bench.random_models import EIGHT
from tenuto.base.clock import SystemClock
from tenuto.base.config import EngineConfig, engine_config
from tenuto.base.options import TurnParams
from tenuto.engine.engine import Engine
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.session.turn import Turn


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions that take `turns` turns each, one after the other, of `given` tokens in and `sampled` out."""

    sessions: int = 64
    turns: int = 3
    given: int = 512
    sampled: int = 128

    @property
    def context(self) -> int:
        """The tokens of a session in the end."""
        return self.turns * (self.given + self.sampled)

    def config(self, made: ModelExecutor) -> EngineConfig:
        """Returns the configuration of an engine that has the executor's defaults."""
        return engine_config({"context_length": self.context + 1, "prefix_cache": False}, defaults=made.defaults)


LOAD = Load()


@dataclass(frozen=True, slots=True)
class Taken:
    """A measured round: the seconds of all turns, those to the first token of each, and sampled tokens by session."""

    seconds: float
    first: list[float]
    tokens: list[list[int]]


def compared() -> dict[str, Any]:
    """Measures sessions of a model of 8 billion parameters with captured steps and with steps queued kernel by kernel.
    `tokens_s`: sampled tokens; `of_limit`: their share of what the device would sample if it computed the same prompts
    and decodes apart, in steps of one kind."""
    load, found = LOAD, dict[str, Any]()
    for name, kind in {"captured": GpuForward, "kernel by kernel": Eager}.items():
        with executor(EIGHT, HALF, kind) as made:
            limit = alone(made, load) if kind is GpuForward else found["alone_tokens_s"]
            found["alone_tokens_s"] = limit
            taken = take_turns(made, load)
        speed = load.sessions * load.turns * load.sampled / taken.seconds
        found[name] = {
            "tokens_s": speed,
            "of_limit": speed / limit,
            "first_token_ms": 1e3 * statistics.median(taken.first),
            "first_token_high_ms": 1e3 * statistics.quantiles(taken.first, n=20)[-1],
        }
    return found


def take_turns(made: ModelExecutor, load: Load, rounds: int = 2) -> Taken:
    """Runs an engine with sessions, which begin a turn as soon as the one before it has ended, several times. Returns
    what the last round took; those before it capture steps."""
    pages = load.sessions * (-(-load.context // PAGE) + 2) + 8
    vocab = made.forward.config.vocab
    engine = Engine(
        made,
        (pages,) * len(made.spec.groups),
        load.config(made),
        vocab_size=vocab,
        eos_ids=(),
        clock=SystemClock(),
        random=Random(0),
    )
    for number in range(rounds):
        taken = _one_round(engine, load, Random(number), vocab)
    engine.end()
    made.forward.release_units()
    return taken


def _one_round(engine: Engine, load: Load, draw: Random, vocab: int) -> Taken:
    params = TurnParams(max_new_tokens=load.sampled, ignore_eos=True)
    left, begun = [load.turns] * load.sessions, dict[int, float]()
    first: list[float] = []
    tokens: list[list[int]] = [[] for _ in range(load.sessions)]

    def begin(number: int) -> Turn:
        left[number] -= 1
        begun[number] = time.perf_counter()
        return engine.turns.submit(f"s{number}", [draw.randrange(vocab) for _ in range(load.given)], params)

    for number in range(load.sessions):
        engine.sessions.open(f"s{number}")
    start = time.perf_counter()
    running = {number: begin(number) for number in range(load.sessions)}
    while running:
        engine.step()
        now = time.perf_counter()
        for number, turn in list(running.items()):
            if turn.output and number in begun:
                first.append(now - begun.pop(number))
            if turn.state.ended:
                tokens[number] += turn.output
                if left[number]:
                    running[number] = begin(number)
                else:
                    del running[number]
    seconds = time.perf_counter() - start
    for number in range(load.sessions):
        engine.sessions.close(f"s{number}")
    while not engine.idle:
        engine.step()
    return Taken(seconds, first, tokens)


def alone(made: ModelExecutor, load: Load) -> float:
    """Returns the tokens a second that the device would sample if it computed the prompts of `load`, a few rows at a
    time, and its decodes, of all sessions together at half of their context, apart from each other."""
    draw, few = np.random.default_rng(0), 4
    prompts = draw.integers(0, made.forward.config.vocab, (few, load.given)).astype(np.int32)
    rows = Rows(made, few, load.given)

    def prefill() -> None:
        rows.at = 0
        rows.run(prompts)

    each_prompt = _seconds(prefill, 5) / few
    made.forward.release_units()
    rows = Rows(made, load.sessions, load.context)
    rows.fill(load.context // 2)
    first = np.ones(load.sessions, np.int32)

    def decode() -> None:
        rows.at = load.context // 2
        rows.decode(first, steps)

    steps = min(load.sampled, load.context // 2)
    each_step = _seconds(decode, 3) / steps
    made.forward.release_units()
    return load.sampled / (each_prompt + load.sampled * each_step / load.sessions)


def _seconds(work: Callable[[], None], times: int) -> float:
    """Returns the median seconds of `work`, after one time that does not count."""
    found = []
    for _ in range(1 + times):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])
