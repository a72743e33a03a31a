"""Builds an executor from a model's files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from tenuto.base.config import KERNELS, cache_dir
from tenuto.base.errors import ConfigError, InvalidRequest
from tenuto.base.groups import MemorySpec
from tenuto.exec.device import check_device, is_cpu, usable_cores
from tenuto.exec.forward import Forward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.kernels.elements import Element, KVCacheDtype
from tenuto.kernels.native.build import VARIANTS, Machine, Unavailable, library
from tenuto.kernels.native.library import Library, loaded
from tenuto.models.checkpoint import ModelCheckpoint, open_checkpoint
from tenuto.models.config import ModelConfig
from tenuto.models.native.obstacle import obstacle
from tenuto.models.native.program import NativeProgram
from tenuto.models.store import ModelFiles, resolve
from tenuto.models.weights import StoredWeight

Weights = Iterable[tuple[str, StoredWeight]]


def load_executor(  # noqa: PLR0913 - each is a separate option
    files: ModelFiles,
    page_size: int,
    device: str = "cpu",
    dtype: str | None = None,
    *,
    context: int | None = None,
    kernels: str = "auto",
    kv_cache_dtype: str = "auto",
    cache: Path | None = None,
    machine: Machine | None = None,
    say: Callable[[str], None] = lambda _: None,
    checkpoint: ModelCheckpoint | None = None,
) -> ModelExecutor:
    """Reads a model and builds an executor, which is not yet prepared.

    `dtype` is an `Element`. By default, native kernels use weights as they are stored, and PyTorch uses float32 on a
    CPU and bfloat16 elsewhere. `context` is the maximum number of tokens of a session, by default the model's limit;
    some models rotate queries and keys differently for long contexts. `kernels` is one of `KERNELS`; native ones are
    compiled into `cache` and unavailable without it. `kv_cache_dtype` is a `KVCacheDtype`; values other than `auto`
    need native kernels. `say` receives a message before kernels are compiled, which takes some seconds, and the reason
    if plain PyTorch is used as a fallback. `checkpoint`: the model, if it is open already. Raises `ModelError` for the
    files and `ConfigError` for options that are invalid or cannot be combined.
    """
    check_device(device)
    if dtype is not None and dtype not in list(Element):
        raise ConfigError(f"dtype is {dtype!r}; allowed: {', '.join(Element)}")
    if kernels not in KERNELS:
        raise ConfigError(f"kernels are {kernels!r}; allowed: {', '.join(KERNELS)}")
    if kv_cache_dtype not in list(KVCacheDtype):
        raise ConfigError(f"kv_cache_dtype is {kv_cache_dtype!r}; allowed: {', '.join(KVCacheDtype)}")
    kept_as = KVCacheDtype(kv_cache_dtype)
    opening = _Opening(
        files, page_size, device, dtype, context, kernels, kept_as, cache, machine or Machine.this(), say
    )
    forward = opening.forward(files, checkpoint)
    wide = forward.wide if isinstance(forward, NativeForward) else None
    return ModelExecutor(forward, partial(opening.again, forward.config, forward.spec, forward.layout, wide))


@dataclass(frozen=True, slots=True)
class _Opening:
    """The arguments of `load_executor`, with which weights are read at the start and again later."""

    files: ModelFiles
    page_size: int
    device: str
    dtype: str | None
    context: int | None
    kernels: str
    kv_cache_dtype: KVCacheDtype
    cache: Path | None
    machine: Machine
    say: Callable[[str], None]

    def forward(
        self, files: ModelFiles, checkpoint: ModelCheckpoint | None = None, wide: frozenset[int] | None = None
    ) -> Forward:
        """Builds the forward pass of a model, whose weights are opened here unless `checkpoint` is given. `wide`: see
        `NativeProgram`. Raises `ModelError` or `ConfigError`."""
        checkpoint = checkpoint or open_checkpoint(files)
        longest = checkpoint.config.max_context
        config = checkpoint.config.within(min(self.context or longest, longest))
        native = self._native_forward(config, checkpoint, wide)
        if native is not None:
            return native
        return _torch_forward(config, checkpoint.weights(), self.page_size, self.device, self.dtype)

    def _native_forward(
        self, config: ModelConfig, checkpoint: ModelCheckpoint, wide: frozenset[int] | None
    ) -> Forward | None:
        """Builds the forward pass with native kernels; None if plain PyTorch must compute."""
        dtype, cache, kernels = self.dtype, self.cache, self.kernels
        if kernels == "torch" or not is_cpu(self.device) or dtype not in (None, "bfloat16") or cache is None:
            if kernels in VARIANTS:
                raise ConfigError(
                    f"kernels {kernels!r} need a cache to be compiled into, and are for the CPU and dtype bfloat16; "
                    f"here: {self.device}, {dtype}"
                )
            self._refuse_bytes(f"they are for the CPU and dtype bfloat16; here: {kernels}, {self.device}, {dtype}")
            return None
        try:
            found = _native(config, cache, self.machine, kernels, self.say)
            packed = _packed(config, checkpoint.weights(), self.page_size, dtype, self.kv_cache_dtype, wide)
            return NativeForward(found, packed, threads=usable_cores())
        except Unavailable as reason:
            if kernels != "auto":
                raise ConfigError(f"kernels {kernels!r} cannot be used: {reason}") from reason
            self._refuse_bytes(str(reason))
            self.say(f"Plain PyTorch computes: {reason}")
            return None

    def _refuse_bytes(self, reason: str) -> None:
        """Raises `ConfigError` unless `kv_cache_dtype` is `auto`, the only one without native kernels. `reason`: why
        these cannot compute."""
        if self.kv_cache_dtype is not KVCacheDtype.AUTO:
            raise ConfigError(
                f"kv_cache_dtype is {self.kv_cache_dtype.value!r}, which needs native kernels: {reason}; allowed with "
                f"plain PyTorch: {KVCacheDtype.AUTO.value}"
            )

    def again(
        self, config: ModelConfig, spec: MemorySpec, layout: str, wide: frozenset[int] | None, path: str | None
    ) -> Forward:
        """Reads the model again, or the one at `path`, to replace the weights that run. Raises `InvalidRequest` unless
        the model has this shape, these memory groups and this layout of units, and `ModelError` or `ConfigError`."""
        files = self.files if path is None else resolve(path, cache_dir())
        forward = self.forward(files, wide=wide)
        differing = _differing(config, forward.config)
        if differing or forward.spec != spec or forward.layout != layout:
            forward.close()
            raise InvalidRequest(
                f"the model at {files.path} has another shape ({', '.join(differing) or 'memory'}); allowed: other "
                "weights for the model that runs",
                param="model_path",
            )
        return forward


def _differing(first: ModelConfig, second: ModelConfig) -> list[str]:
    """Returns the fields in which two models compute differently, ignoring those that describe storage or tokens."""
    stored = ("dtype", "eos", "bos", "max_context")
    names = [each.name for each in fields(ModelConfig) if each.name not in stored]
    return [name for name in names if getattr(first, name) != getattr(second, name)]


def _torch_forward(config: ModelConfig, weights: Weights, page_size: int, device: str, dtype: str | None) -> Forward:
    import torch  # noqa: PLC0415 - takes a second or more, and native kernels do not need it

    from tenuto.exec.torch_forward import TorchForward  # noqa: PLC0415 - needs torch
    from tenuto.models.decoder import Decoder  # noqa: PLC0415 - needs torch

    place = torch.device(device)
    element = Element(dtype) if dtype else Element.FLOAT32 if is_cpu(device) else Element.BFLOAT16
    decoder = Decoder(config, weights, place, getattr(torch, element))
    return TorchForward(decoder, page_size)


def _native(config: ModelConfig, cache: Path, machine: Machine, kernels: str, say: Callable[[str], None]) -> Library:
    reason = obstacle(config)
    if reason is not None:
        raise Unavailable(f"the native kernels cannot run this model: {reason}")
    if kernels != "auto":
        return loaded(library(cache, machine, kernels, say))
    failed = Unavailable("this CPU lacks AVX2")
    for variant in machine.variants():  # the compiler or the system may not support the best one
        try:
            return loaded(library(cache, machine, variant, say))
        except Unavailable as error:
            failed = error
    raise failed


def _packed(
    config: ModelConfig,
    weights: Weights,
    page_size: int,
    dtype: str | None,
    kept_as: KVCacheDtype,
    wide: frozenset[int] | None,
) -> NativeProgram:
    try:
        return NativeProgram(config, weights, page_size, plain=dtype is not None, kv_cache_dtype=kept_as, wide=wide)
    except OSError as error:
        raise ConfigError(f"there is no memory for the model's weights: {error}") from error
