"""Engines in this process: both faces of the client, with a model."""

from __future__ import annotations

from typing import Any, Unpack, cast

from tenuto.api.transport import LocalTransport
from tenuto.base.config import EngineOptions
from tenuto.base.messages import WorkerSettings
from tenuto.client.aio import AsyncClient, AsyncSession
from tenuto.client.sync import Client, Session
from tenuto.text.tokenizer import Tokenizer


class ModelOptions(EngineOptions, total=False):
    """How a model is run, besides the options of its engine, which are fields of `tenuto.base.config.EngineConfig`.

    `device`: `cpu`, the default, `cuda` or another name of PyTorch's. `dtype`: `float32`, `bfloat16` or `float16`; by
    default the first on a CPU, else the second. `memory_bytes` are for model state; by default what two turns of the
    whole context need. `page_size`: token slots a page of memory. `kernels`: `auto`, the default, takes the best there
    are for the device; `amx`, `avx512_bf16`, `avx512` and `avx2` are variants of the native ones for CPUs, `torch` is
    plain PyTorch. `journal`: a file in which committed sessions survive the process; an engine that is given it later
    goes on with them.
    """

    device: str
    dtype: str | None
    memory_bytes: int | None
    page_size: int
    kernels: str
    journal: str | None


def _settings(model: str, options: ModelOptions) -> WorkerSettings:
    rest: dict[str, Any] = dict(options)
    own = ModelOptions.__annotations__.keys() - EngineOptions.__annotations__.keys()
    own_given = {name: rest.pop(name) for name in own & rest.keys()}
    return WorkerSettings(model=model, config=cast("EngineOptions", rest), **own_given)


class Engine(Client[Session]):
    """A model, ready for sessions. Close it, or use it as a context manager.

    `model`: `smollm2`, a `.gguf` file, a Hugging Face directory or a hub id. `ModelOptions` says what else may be
    given. Raises `ModelError` or `ConfigError`.
    """

    session_type = Session

    def __init__(self, model: str = "smollm2", **options: Unpack[ModelOptions]) -> None:
        self._transport = LocalTransport(_settings(model, options))
        super().__init__(self._transport)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._transport.tokenizer


class AsyncEngine(AsyncClient[AsyncSession]):
    """As `tenuto.Engine`. Making one loads the model and blocks meanwhile; `asyncio.to_thread(AsyncEngine, ...)` does
    it in the background."""

    session_type = AsyncSession

    def __init__(self, model: str = "smollm2", **options: Unpack[ModelOptions]) -> None:
        self._transport = LocalTransport(_settings(model, options))
        super().__init__(self._transport)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._transport.tokenizer

    @property
    def context_length(self) -> int:
        """The most tokens a session's history may have."""
        return self._transport.context_length
