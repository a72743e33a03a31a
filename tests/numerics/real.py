"""Engines on real models."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from tenuto.base.config import EngineConfig
from tenuto.engine.engine import Engine
from tenuto.exec.forward import Forward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.session.turn import Turn
from tests.clock import ManualClock


@contextmanager
def real_engine(forward: Forward, config: EngineConfig, *, units: tuple[int, ...]) -> Iterator[Engine]:
    executor = ModelExecutor(forward)
    vocab, eos = forward.config.vocab, forward.config.eos
    yield Engine(executor, units, config, vocab_size=vocab, eos_ids=eos, clock=ManualClock(), random=Random(0))
    executor.close()


def finish(engine: Engine, turn: Turn) -> Turn:
    """Steps until `turn` has ended."""
    while not turn.state.ended:
        assert engine.step().worked, f"{turn!r} waits although nothing is computed"
    return turn
