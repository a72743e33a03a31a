"""Engines in this process: a loaded model behind a synchronous or an asynchronous client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, cast

from tenuto.api.transport import LocalTransport
from tenuto.base.checks import items
from tenuto.base.config import DEFAULT_MODEL, EngineOptions, WorkerSettings
from tenuto.client.aio import AsyncClient, AsyncSession
from tenuto.client.sync import Client, Session
from tenuto.text.tokenizer import Tokenizer


class ModelOptions(EngineOptions, total=False):
    """Options for running a model: those of `tenuto.base.config.WorkerSettings` and `EngineConfig`, which describe
    each. `memory` is by default enough for two sessions with full contexts, their turns and older checkpoints;
    `memory_bytes` is another name for it."""

    device: str
    dtype: str | None
    memory: int | float | str | None
    memory_bytes: int | None
    page_size: int
    kernels: str
    kv_cache_dtype: str
    tensor_parallel: int
    share_weights: bool
    lora_modules: Sequence[str]
    journal: str | None


def _settings(model: str, options: ModelOptions) -> WorkerSettings:
    rest: dict[str, Any] = dict(options)
    if "memory_bytes" in rest:
        rest["memory"] = rest.pop("memory_bytes")
    own = ModelOptions.__annotations__.keys() - EngineOptions.__annotations__.keys()
    own_given = {name: rest.pop(name) for name in own & rest.keys()}
    if "lora_modules" in own_given:
        own_given["lora_modules"] = items("lora_modules", own_given["lora_modules"], "a list of NAME=PATH")
    return WorkerSettings(model=model, config=cast("EngineOptions", rest), **own_given)


class Engine(Client[Session]):
    """A loaded model, ready for sessions. Close it, or use it as a context manager.

    `model` is `smollm2`, the path of a `.gguf` file or Hugging Face directory, or a hub id. See `ModelOptions` for the
    options. Raises `ModelError` or `ConfigError`.
    """

    session_type = Session

    def __init__(self, model: str = DEFAULT_MODEL, **options: Unpack[ModelOptions]) -> None:
        self._transport = LocalTransport(_settings(model, options))
        super().__init__(self._transport)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._transport.tokenizer


class AsyncEngine(AsyncClient[AsyncSession]):
    """The asynchronous `tenuto.Engine`. The constructor blocks while it loads the model; use `await
    asyncio.to_thread(AsyncEngine, ...)` to load it in the background."""

    session_type = AsyncSession

    def __init__(self, model: str = DEFAULT_MODEL, **options: Unpack[ModelOptions]) -> None:
        self._transport = LocalTransport(_settings(model, options))
        super().__init__(self._transport)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._transport.tokenizer

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a session's history."""
        return self._transport.context_length
