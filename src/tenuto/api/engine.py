"""Engines in this process: a loaded model behind a synchronous or an asynchronous client."""

from __future__ import annotations

from typing import Any, Unpack, cast

from tenuto.api.transport import LocalTransport
from tenuto.base.config import EngineOptions
from tenuto.base.wire.messages import WorkerSettings
from tenuto.client.aio import AsyncClient, AsyncSession
from tenuto.client.sync import Client, Session
from tenuto.text.tokenizer import Tokenizer


class ModelOptions(EngineOptions, total=False):
    """Options for running a model, in addition to the engine's options, the fields of
    `tenuto.base.config.EngineConfig`.

    `device` is `cpu` (the default), `cuda` or another PyTorch device. `dtype` is `float32`, `bfloat16` or `float16`. By
    default, native kernels use weights as they are stored, and PyTorch computes in float32 on a CPU and in bfloat16
    elsewhere. `memory_bytes` is the memory for model state, by default enough for two sessions with full contexts,
    their turns and older checkpoints. `page_size` is the number of token slots per page.

    `kernels` is `auto` (the default), the best available for the device; `amx`, `avx512_bf16`, `avx512` or `avx2`,
    native kernels for CPUs; or `torch`, plain PyTorch. `kv_cache_dtype` is the type of keys and values in memory:
    `auto` (the default), 16 bits with native kernels and `dtype` with PyTorch; or `int8`, which halves their memory and
    needs native kernels. `journal` is a file that keeps committed sessions beyond the life of the process; an engine
    started with it later has these sessions.
    """

    device: str
    dtype: str | None
    memory_bytes: int | None
    page_size: int
    kernels: str
    kv_cache_dtype: str
    journal: str | None


def _settings(model: str, options: ModelOptions) -> WorkerSettings:
    rest: dict[str, Any] = dict(options)
    own = ModelOptions.__annotations__.keys() - EngineOptions.__annotations__.keys()
    own_given = {name: rest.pop(name) for name in own & rest.keys()}
    return WorkerSettings(model=model, config=cast("EngineOptions", rest), **own_given)


class Engine(Client[Session]):
    """A loaded model, ready for sessions. Close it, or use it as a context manager.

    `model` is `smollm2`, the path of a `.gguf` file or Hugging Face directory, or a hub id. See `ModelOptions` for the
    options. Raises `ModelError` or `ConfigError`.
    """

    session_type = Session

    def __init__(self, model: str = "smollm2", **options: Unpack[ModelOptions]) -> None:
        self._transport = LocalTransport(_settings(model, options))
        super().__init__(self._transport)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._transport.tokenizer


class AsyncEngine(AsyncClient[AsyncSession]):
    """The asynchronous `tenuto.Engine`. The constructor blocks while it loads the model; use `await
    asyncio.to_thread(AsyncEngine, ...)` to load it in the background."""

    session_type = AsyncSession

    def __init__(self, model: str = "smollm2", **options: Unpack[ModelOptions]) -> None:
        self._transport = LocalTransport(_settings(model, options))
        super().__init__(self._transport)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._transport.tokenizer

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a session's history."""
        return self._transport.context_length
