"""From a model's name to a running engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from random import SystemRandom
from typing import Any

from tenuto.base.clock import SystemClock
from tenuto.base.config import EngineConfig, cache_dir
from tenuto.base.errors import ConfigError
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.base.plan import Executor
from tenuto.engine.engine import Engine, shape_of
from tenuto.engine.text import TokenTextStream
from tenuto.exec.witness import WitnessExecutor
from tenuto.memory.memory import Shape, turn_units, units_for_budget
from tenuto.text.chat import ChatTemplate
from tenuto.text.tokenizer import Tokenizer

WITNESS = "witness"
"""The model without weights, for tests: its next token is a function of a hash of the history."""
WITNESS_VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class Model:
    """An executor and what belongs to its model. `max_context` is the longest context it was made for, in tokens."""

    executor: Executor
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_context: int
    tokenizer: Tokenizer | None = None
    chat: ChatTemplate | None = None


def load_model(name: str, device: str, dtype: str | None, page_size: int) -> Model:
    """Raises `ModelError` or `ConfigError`."""
    if page_size < 1:
        raise ConfigError(f"page_size is {page_size}; allowed: at least 1")
    if name == WITNESS:
        groups = [GroupSpec(Kind.FULL, 16 * page_size)]
        return Model(WitnessExecutor(page_size, groups, WITNESS_VOCABULARY), WITNESS_VOCABULARY, (), 2**20)
    # Slow to import; the witness does without them.
    from tenuto.exec.torch_executor import load_executor  # noqa: PLC0415
    from tenuto.models.store import resolve  # noqa: PLC0415
    from tenuto.text.load import load_tokenizer  # noqa: PLC0415

    files = resolve(name, cache_dir())
    executor = load_executor(files, page_size, device, dtype)
    config, tokenizer = executor.model.config, load_tokenizer(files.path)
    chat = ChatTemplate(tokenizer.chat_template, tokenizer) if tokenizer.chat_template is not None else None
    eos_ids = tuple(dict.fromkeys((*tokenizer.eos_ids, *config.eos)))
    return Model(executor, min(tokenizer.vocab_size, config.vocab), eos_ids, config.max_context, tokenizer, chat)


def engine_config(model: Model, given: dict[str, Any]) -> EngineConfig:
    """The configuration from fields of `EngineConfig`; the context length defaults to the model's if that is less.
    Raises `ConfigError`."""
    known = {f.name for f in fields(EngineConfig)}
    unknown = given.keys() - known
    if unknown:
        raise ConfigError(f"unknown engine options {sorted(unknown)}; allowed: {sorted(known)}")
    if "context_length" not in given:
        given = {**given, "context_length": min(EngineConfig().context_length, model.max_context)}
    config = EngineConfig(**given)
    if config.context_length > model.max_context:
        raise ConfigError(
            f"context_length is {config.context_length}; allowed: at most the model's {model.max_context} tokens"
        )
    return config


def build_engine(model: Model, config: EngineConfig, memory_bytes: int | None) -> Engine:
    """An engine that uses `memory_bytes` for model state; `None` takes room for two turns of the whole context. Raises
    `ConfigError` if one does not fit."""
    spec = model.executor.spec
    shape = shape_of(config, spec.page_size)
    budget = memory_bytes if memory_bytes is not None else 2 * _turn_bytes(spec, shape)
    units = units_for_budget(spec, shape, budget, expected=max(1, config.context_length // 4))
    text: Callable[[tuple[str, ...]], TokenTextStream] | None = None
    if model.tokenizer is not None:
        text = partial(TokenTextStream, model.tokenizer)
    return Engine(
        model.executor,
        units,
        config,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        clock=SystemClock(),
        random=SystemRandom(),
        text=text,
    )


def _turn_bytes(spec: MemorySpec, shape: Shape) -> int:
    """What `units_for_budget` needs at least."""
    longest = shape.context_length
    return sum(
        (turn_units(g, spec.page_size, shape, longest, generates=True) + 1) * g.bytes_per_unit for g in spec.groups
    )
