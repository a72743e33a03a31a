"""Engines on the default model."""

from random import Random

from tenuto.base.clock import ManualClock
from tenuto.base.config import EngineConfig
from tenuto.engine.engine import Engine
from tenuto.exec.torch_executor import TorchExecutor
from tenuto.models.llama import Llama
from tenuto.session.turn import Turn


def real_engine(model: Llama, config: EngineConfig, *, pages: int, page_size: int, seed: int = 0) -> Engine:
    """The engine closes its executor's thread with the process."""
    executor = TorchExecutor(model, page_size)
    vocab, eos = model.config.vocab, model.config.eos
    return Engine(executor, (pages,), config, vocab_size=vocab, eos_ids=eos, clock=ManualClock(), random=Random(seed))


def finish(engine: Engine, turn: Turn) -> Turn:
    """Step until `turn` has ended."""
    while not turn.state.ended:
        assert engine.step().worked, f"{turn!r} waits, and nothing is computed"
    return turn
