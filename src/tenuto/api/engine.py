"""Engines in this process: both faces of the client, with a model."""

from __future__ import annotations

from typing import Unpack

from tenuto.api.transport import LocalTransport
from tenuto.base.config import EngineOptions
from tenuto.base.messages import WorkerSettings
from tenuto.client.aio import AsyncClient, AsyncSession
from tenuto.client.sync import Client, Session
from tenuto.text.tokenizer import Tokenizer


class Engine(Client[Session]):
    """A model, ready for sessions. Close it, or use it as a context manager.

    `model`: `smollm2`, a `.gguf` file, a Hugging Face directory or a hub id. `device`: `cpu`, `cuda` or another name of
    PyTorch's. `dtype`: `float32`, `bfloat16` or `float16`; by default the first on a CPU, else the second.
    `memory_bytes` are for model state; by default what two turns of the whole context need. `config`: fields of
    `tenuto.base.config.EngineConfig`. Raises `ModelError` or `ConfigError`.
    """

    session_type = Session

    def __init__(
        self,
        model: str = "smollm2",
        *,
        device: str = "cpu",
        dtype: str | None = None,
        memory_bytes: int | None = None,
        page_size: int = 16,
        **config: Unpack[EngineOptions],
    ) -> None:
        settings = WorkerSettings(
            model=model, device=device, dtype=dtype, memory_bytes=memory_bytes, page_size=page_size, config=config
        )
        self._transport = LocalTransport(settings)
        super().__init__(self._transport)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._transport.tokenizer


class AsyncEngine(AsyncClient[AsyncSession]):
    """As `tenuto.Engine`. Making one loads the model and blocks meanwhile; `asyncio.to_thread(AsyncEngine, ...)` does
    it in the background."""

    session_type = AsyncSession

    def __init__(
        self,
        model: str = "smollm2",
        *,
        device: str = "cpu",
        dtype: str | None = None,
        memory_bytes: int | None = None,
        page_size: int = 16,
        **config: Unpack[EngineOptions],
    ) -> None:
        settings = WorkerSettings(
            model=model, device=device, dtype=dtype, memory_bytes=memory_bytes, page_size=page_size, config=config
        )
        self._transport = LocalTransport(settings)
        super().__init__(self._transport)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._transport.tokenizer

    @property
    def context_length(self) -> int:
        """The most tokens a session's history may have."""
        return self._transport.context_length
