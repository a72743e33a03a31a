"""Loads models by name and builds engines for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from random import SystemRandom
from time import sleep
from typing import Protocol

from tenuto.base.checks import MAX_COUNT, real
from tenuto.base.clock import Clock, SystemClock
from tenuto.base.config import (
    EngineConfig,
    EngineOptions,
    WorkerSettings,
    cache_advice,
    cache_dir,
    engine_config,
    user_path,
)
from tenuto.base.embedding import EmbeddingHabits
from tenuto.base.errors import ConfigError
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.base.plan import Executor
from tenuto.base.tools.definitions import ModelHabits
from tenuto.base.views import ModelView
from tenuto.engine.engine import Engine
from tenuto.exec.device import is_cpu, spare_bytes, total_bytes
from tenuto.exec.witness import WitnessExecutor
from tenuto.exec.witness_hashes import WIDTH as WITNESS_WIDTH
from tenuto.memory.memory import kept_bytes, session_bytes, units_for_budget
from tenuto.memory.shape import Shape
from tenuto.memory.tiers.disk import Watcher
from tenuto.memory.tiers.unit_files import UnitFiles
from tenuto.sched.draft_model import DraftModel
from tenuto.sched.draft_proposer import DraftProposer
from tenuto.sched.draft_tables import DraftTables
from tenuto.sched.guesses import Proposer
from tenuto.sched.predictor_proposer import PredictorProposer
from tenuto.sched.suffix_proposer import SuffixProposer
from tenuto.text.chat import ChatTemplate
from tenuto.text.grammars import GrammarCompiler
from tenuto.text.masks import Masks
from tenuto.text.stream import TextStream
from tenuto.text.tokenizer import Tokenizer
from tenuto.text.words import CHAT_TEMPLATE, witness_tokenizer

log = logging.getLogger("tenuto.model")

WITNESS = "witness"
"""A model without weights, for tests: its next token is a function of a hash of the history. With `witness:0.01`, a
step takes 10 milliseconds."""
WITNESS_VOCABULARY = 1000
LOOKAHEAD = 15
"""The most tokens that are guessed ahead of a turn."""
WITNESS_EMBEDDING = EmbeddingHabits(WITNESS_WIDTH, shorter=None)


class WeightsIdentity(Protocol):
    """The identity of a model's weights, so that saved state is only used with the weights that computed it."""

    @property
    def stamps(self) -> tuple[object, ...]:
        """Stamps of the weights' files; they change whenever a file is written."""

    @property
    def value(self) -> str:
        """A digest, equal only for equal weights."""

    def again(self) -> WeightsIdentity:
        """Returns the identity of the same files in their present state."""


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """The identity of weights without files, such as the witness's: their name."""

    value: str
    stamps: tuple[object, ...] = ()

    def again(self) -> NamedWeights:
        """See `WeightsIdentity`."""
        return self


@dataclass(frozen=True, slots=True)
class Model:
    """An executor with its model's tokenizer, chat template and other facts. `max_context` is the model's longest
    context in tokens. `spare_bytes` is the device memory available for a server's sessions. `compute` describes to
    users the code and device that compute. `ropes`: see `ModelConfig.ropes`. `reading(path)` returns the identity of
    the weights at `path`. `draft`: a smaller model of the same vocabulary that guesses this one's tokens."""

    executor: Executor
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_context: int
    tokenizer: Tokenizer | None = None
    chat: ChatTemplate | None = None
    name: str = WITNESS
    path: str = ""
    spare_bytes: int = 2**28
    compute: str = "no model: each token follows from a hash of the history"
    weights: WeightsIdentity = NamedWeights(WITNESS)
    ropes: bytes = b""
    reading: Callable[[str], WeightsIdentity] = NamedWeights
    embedding: EmbeddingHabits = WITNESS_EMBEDDING
    draft: Model | None = None

    def grammars(self) -> GrammarCompiler | None:
        """Returns a compiler of grammars for the model's tokens; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return GrammarCompiler(
            self.tokenizer, self.vocab_size, (*self.eos_ids, *(self.chat.stop_ids if self.chat else ()))
        )

    def configured(self, given: EngineOptions) -> EngineConfig:
        """Resolves an engine's configuration for this model. Raises `ConfigError`."""
        config = engine_config(given, self.max_context, self.executor.defaults)
        exact = self.executor.batch_invariant
        if config.speculate == "mtp" and not self.executor.predicts:
            raise ConfigError(
                "speculate is 'mtp', but the model's files have no head for multi-token prediction that is supported; "
                "allowed: auto, suffix, off"
            )
        if config.speculate == "off" or self.embedding.only or (config.speculate == "auto" and not exact):
            return config
        if not exact:
            log.warning("guesses may change tokens: what these kernels compute depends on a step's other tokens")
        return replace(config, lookahead=LOOKAHEAD)

    @property
    def fingerprint(self) -> str:
        """A digest of the vocabulary, equal for models in which every token id means the same."""
        return self.tokenizer.fingerprint if self.tokenizer is not None else f"{self.vocab_size} tokens"

    def with_draft(self, draft: Model) -> Model:
        """Returns the model with a draft model. Raises `ConfigError` unless both have the same vocabulary."""
        if (draft.fingerprint, draft.vocab_size) != (self.fingerprint, self.vocab_size):
            raise ConfigError(
                f"speculate is {draft.name!r}, a model with another vocabulary ({draft.vocab_size} tokens); allowed: "
                f"models with that of {self.name!r} ({self.vocab_size} tokens)"
            )
        return replace(self, draft=draft)

    def state_fingerprint(self) -> str:
        """Returns a digest of the model, its weights and its memory layout. Models with equal digests can use each
        other's units of memory."""
        parts = (self.fingerprint, self.weights.value, self.ropes, self.executor.layout, self.executor.spec)
        return sha256(repr(parts).encode()).hexdigest()

    def tier_identity(self, config: EngineConfig) -> str:
        """Returns `state_fingerprint` if there is a disk tier, otherwise "": large models take seconds to hash."""
        return self.state_fingerprint() if config.disk_tier else ""

    def with_weights(self, path: str | None) -> Model:
        """Returns the model with the weights now at `path`, by default where its own were read. Call this before the
        executor loads the weights."""
        return replace(self, weights=self.weights.again() if path is None else self.reading(path))


def load_model(settings: WorkerSettings) -> Model:
    """Loads the model that the settings name, and its draft model if they name one. Raises `ModelError` or
    `ConfigError`."""
    name = engine_config(settings.config).draft_model
    if name is None:
        return _load(settings)
    alone: EngineOptions = {**settings.config, "speculate": "off"}
    draft = _load(replace(settings, model=name, kv_cache_dtype="auto", tensor_parallel=1, config=alone))
    try:
        return _load(settings).with_draft(draft)  # the draft model first: the other gets the memory that is left
    except BaseException:
        draft.executor.close()
        raise


def _load(settings: WorkerSettings) -> Model:
    """Loads one model. Raises `ModelError` or `ConfigError`."""
    kind, _, step_seconds = settings.model.partition(":")
    if kind == WITNESS:
        if settings.tensor_parallel != 1:
            raise ConfigError(f"tensor_parallel is {settings.tensor_parallel}; allowed for the witness: 1")
        if (given := settings.kv_cache_dtype) != "auto":
            raise ConfigError(f"kv_cache_dtype is {given!r}; allowed for the witness, which has none: auto")
        return _witness(settings.model, settings.page_size, step_seconds)
    # Slow to import; the witness does not need them.
    from tenuto.exec.load import ExecutorOptions, load_executor  # noqa: PLC0415 - loaded where it is used
    from tenuto.formats.gguf_file import GgufFile  # noqa: PLC0415 - loaded where it is used
    from tenuto.models.checkpoint import open_checkpoint  # noqa: PLC0415 - loaded where it is used
    from tenuto.models.digest import WeightsDigest  # noqa: PLC0415 - loaded where it is used
    from tenuto.models.embedding_files import embedding_habits  # noqa: PLC0415 - loaded where it is used
    from tenuto.models.store import FileFormat, resolve  # noqa: PLC0415 - loaded where it is used
    from tenuto.text.load import load_tokenizer  # noqa: PLC0415 - loaded where it is used

    if advice := cache_advice():
        log.warning(advice)
    files = resolve(settings.model, cache_dir())
    weights = WeightsDigest(files)
    opened = (
        GgufFile(files.path) if files.format is FileFormat.GGUF else None
    )  # opened once, as reading the vocabulary takes a while
    executor = load_executor(
        files,
        ExecutorOptions(
            settings.page_size,
            settings.device,
            settings.dtype,
            context=engine_config(settings.config).context_length,
            kernels=settings.kernels,
            kv_cache_dtype=settings.kv_cache_dtype,
            tensor_parallel=settings.tensor_parallel,
            predictor=engine_config(settings.config).speculate == "mtp",
            share_weights=settings.share_weights,
            cache=cache_dir(),
            say=log.warning,
        ),
        open_checkpoint(files, opened),
    )
    forward = executor.forward
    config, tokenizer = forward.config, load_tokenizer(files.path, opened)
    chat = ChatTemplate.of(tokenizer)
    if chat is not None and chat.rewrites:
        log.info("the chat template %s; sessions keep earlier turns as they were", " and ".join(chat.rewrites))
    eos_ids = tuple(dict.fromkeys((*tokenizer.eos_ids, *config.eos)))
    vocab_size = min(tokenizer.vocab_size, config.vocab)
    return Model(
        executor,
        vocab_size,
        eos_ids,
        config.max_context,
        tokenizer,
        chat,
        settings.model,
        str(files.path),
        spare_bytes(settings.device) * (1 if is_cpu(settings.device) else settings.tensor_parallel),
        forward.description,
        weights,
        config.ropes(),
        lambda path: WeightsDigest(resolve(path, cache_dir())),
        embedding_habits(files.path, config, opened),
    )


def _witness(name: str, page_size: int, step_seconds: str) -> Model:
    try:
        seconds = real("the witness's time a step", float(step_seconds or 0), 0, 60, ConfigError)
    except ValueError:
        raise ConfigError(f"model is {name!r}; allowed: witness, or witness:SECONDS, the time a step takes") from None
    groups = [GroupSpec(Kind.FULL, 16 * page_size)]
    executor = WitnessExecutor(page_size, groups, WITNESS_VOCABULARY, wait=partial(sleep, seconds))
    tokenizer = witness_tokenizer(WITNESS_VOCABULARY)
    return Model(executor, WITNESS_VOCABULARY, (), 2**20, tokenizer, ChatTemplate(CHAT_TEMPLATE, tokenizer))


def memory_bytes(settings: WorkerSettings) -> int | None:
    """Returns the memory for the state of sessions, in bytes; `None` if the settings do not set it. Raises
    `ConfigError` if they set a share of a device that is missing."""
    memory = settings.memory
    return int(memory * total_bytes(settings.device)) if isinstance(memory, float) else memory


def build_engine(
    model: Model,
    config: EngineConfig,
    memory_bytes: int | None,
    masks: Masks | None = None,
    watcher: Watcher | None = None,
) -> Engine:
    """Builds an engine that uses `memory_bytes` for model state, by default enough for two sessions with full contexts,
    their turns and older checkpoints. `watcher`: is called when the disk tier changes. Raises `ConfigError` if one turn
    does not fit."""
    spec, clock = model.executor.spec, SystemClock()
    shape = Shape.of(config, spec.page_size)
    budget = memory_bytes if memory_bytes is not None else 2 * session_bytes(spec, shape) + kept_bytes(spec, shape)
    predictor = PredictorProposer() if config.lookahead and config.speculate == "mtp" else None
    proposer: Proposer | None = (predictor or SuffixProposer()) if config.lookahead else None
    if model.draft is not None and proposer is not None:
        pages = draft_pages(model.draft.executor.spec, config, budget)
        budget -= 0 if memory_bytes is None else pages * page_bytes(model.draft.executor.spec)
        proposer = DraftProposer(draft_model(model.draft, config, pages, clock), proposer)
    units = units_for_budget(spec, shape, budget, expected=max(1, config.context_length // 4))
    text = partial(TextStream, model.tokenizer) if model.tokenizer is not None else None
    identity, disk = model.tier_identity(config), None
    if config.disk_tier and watcher is not None:
        disk = UnitFiles(user_path(config.disk_tier), config.disk_tier_size or MAX_COUNT, identity, watcher)
    return Engine(
        model.executor,
        units,
        config,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        clock=clock,
        random=SystemRandom(),
        text=text,
        proposer=proposer,
        predictor=predictor,
        masks=masks,
        disk=disk,
        identity=identity,
        generates=not model.embedding.only,
    )


def page_bytes(spec: MemorySpec) -> int:
    """Returns the bytes of a page in each group."""
    return sum(group.bytes_per_unit for group in spec.groups)


def draft_pages(spec: MemorySpec, config: EngineConfig, budget: int) -> int:
    """Returns the number of pages of a draft model. They take an eighth of `budget` bytes, and hold at least one full
    context, and at most as many as may run at once."""
    one = -(-config.context_length // spec.page_size)
    return max(one, min(config.max_running * one, budget // (8 * page_bytes(spec))))


def draft_model(model: Model, config: EngineConfig, pages: int, clock: Clock) -> DraftModel:
    """Prepares a model to guess the tokens of another one. Raises `ConfigError` if it has recurrent layers."""
    tables = DraftTables(model.executor.spec, pages, config.max_running)
    model.executor.prepare((pages,) * len(tables.pools), config.max_running, overlap=0)
    return DraftModel(model.executor, tables, clock, vocab_size=model.vocab_size, context=model.max_context)


def server_budget(model: Model, config: EngineConfig) -> int:
    """Returns a server's default memory for model state. It is enough for as many sessions with full contexts as may
    run at once, with their turns and older checkpoints, limited by the device's spare memory, but enough for at least
    two."""
    spec = model.executor.spec
    shape = Shape.of(config, spec.page_size)
    one, kept = session_bytes(spec, shape), kept_bytes(spec, shape)
    least = 2 * one
    if model.draft is not None:
        draft = model.draft.executor.spec
        least += draft_pages(draft, config, 0) * page_bytes(draft)
    return kept + max(least, min((config.max_running + 1) * one, model.spare_bytes - kept))


def describe(model: Model, engine: Engine) -> ModelView:
    """Describes a model and the engine that serves it."""
    pools = engine.memory.pools
    page_size = engine.memory.page_size
    paged = [pools[group].capacity for group in engine.memory.paged]
    tokenizer = model.tokenizer
    return ModelView(
        model=model.name,
        path=model.path,
        vocab_size=model.vocab_size,
        context_length=engine.config.context_length,
        max_context=model.max_context,
        compute=model.compute,
        page_size=page_size,
        capacity_tokens=min(paged) * page_size if paged else 0,
        units={pool.name: pool.capacity for pool in engine.pools},
        guess_bytes=kept_bytes(engine.memory.spec, engine.memory.shape),
        adds_bos=tokenizer.adds_bos if tokenizer is not None else False,
        bos_id=tokenizer.bos_id if tokenizer is not None else None,
        eos_ids=list(model.eos_ids),
        fill=tokenizer.fill if tokenizer is not None else None,
        has_text=tokenizer is not None,
        has_chat=model.chat is not None,
        habits=model.chat.habits if model.chat is not None else ModelHabits(),
        embedding=model.embedding,
        pid=os.getpid(),
        config=engine.config,
        adapters=[*engine.core.adapters],
    )
