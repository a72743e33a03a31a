"""Builds an executor from a model's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from tenuto import models
from tenuto.base.config import KERNELS, cache_dir, user_path
from tenuto.base.errors import ConfigError, InvalidRequest
from tenuto.exec.device import check_device, is_cpu, usable_cores
from tenuto.exec.forward import Forward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.nodes import Node, interleaved, usable_nodes
from tenuto.kernels import native
from tenuto.kernels.elements import Element, KVCacheDtype
from tenuto.kernels.native.build import VARIANTS, Machine, Unavailable, library
from tenuto.kernels.native.library import Library, loaded
from tenuto.kernels.native.shared_memory import PrivateMemory, WeightMemory, shared_memory
from tenuto.models.adapter import Adapter, Translation, read_adapter
from tenuto.models.checkpoint import ModelCheckpoint, open_checkpoint, weights_of
from tenuto.models.config import ModelConfig
from tenuto.models.digest import WeightsDigest
from tenuto.models.native.key_scales import KeyScales
from tenuto.models.native.obstacle import obstacle
from tenuto.models.native.program import NativeProgram
from tenuto.models.store import ModelFiles, resolve


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """How an executor computes. Raises `ConfigError` for options that are invalid.

    `dtype` is an `Element`. By default, native kernels use weights as they are stored, and PyTorch uses float32 on a
    CPU and bfloat16 elsewhere. `context` is the maximum number of tokens of a session, by default the model's limit;
    some models rotate queries and keys differently for long contexts. `kernels` is one of `KERNELS`; native ones are
    compiled into `cache` and unavailable without it. `predictor`: whether the model's head for multi-token prediction
    is loaded, if it has one. `kv_cache_dtype` is a `KVCacheDtype`; values other than `auto` need native kernels.
    `tensor_parallel`: the number of processes that compute the model together. `share_weights`: whether processes with
    the same `cache`, model and options have one copy of the weights, a file there; needs native kernels. `nodes`: the
    machine's memory nodes, over which native kernels spread weights and, if there is one for each core, threads. `say`
    receives a message before kernels are compiled, which takes some seconds, and the reason if plain PyTorch is used as
    a fallback.
    """

    page_size: int
    device: str = "cpu"
    dtype: str | None = None
    context: int | None = None
    kernels: str = "auto"
    kv_cache_dtype: str = "auto"
    predictor: bool = False
    tensor_parallel: int = 1
    share_weights: bool = False
    cache: Path | None = None
    machine: Machine = field(default_factory=Machine.this)
    nodes: Sequence[Node] = field(default_factory=usable_nodes)
    say: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.dtype is not None and self.dtype not in list(Element):
            raise ConfigError(f"dtype is {self.dtype!r}; allowed: {', '.join(Element)}")
        if self.kernels not in KERNELS:
            raise ConfigError(f"kernels are {self.kernels!r}; allowed: {', '.join(KERNELS)}")
        if self.kv_cache_dtype not in list(KVCacheDtype):
            raise ConfigError(f"kv_cache_dtype is {self.kv_cache_dtype!r}; allowed: {', '.join(KVCacheDtype)}")


def load_executor(
    files: ModelFiles, options: ExecutorOptions, checkpoint: ModelCheckpoint | None = None
) -> ModelExecutor:
    """Reads a model and builds an executor, which is not yet prepared. `checkpoint`: the model, if it is open already.
    Raises `ModelError` for the files and `ConfigError` for options that cannot be combined."""
    checkpoint = checkpoint or open_checkpoint(files)
    forward = _forward(files, options, checkpoint)
    config, spec, layout = forward.config, forward.spec, forward.layout  # `again` must not keep `forward` alive
    scales = forward.key_scales if isinstance(forward, NativeForward) else None

    def again(path: str | None) -> Forward:
        """Reads the model again, or the one at `path`, to replace the weights that run. Raises `InvalidRequest` unless
        the model has this shape, these memory groups and this layout of units, and `ModelError` or `ConfigError`."""
        found = files if path is None else resolve(path, cache_dir())
        other = _forward(found, options, scales=scales)
        differing = _differing(config, other.config)
        if differing or other.spec != spec or other.layout != layout:
            other.close()
            raise InvalidRequest(
                f"the model at {found.path} has another shape ({', '.join(differing) or 'memory'}); allowed: other "
                "weights for the model that runs",
                param="model_path",
            )
        return other

    return ModelExecutor(forward, again, partial(_read_adapter, config, checkpoint.translation))


def _read_adapter(config: ModelConfig, translation: Translation, path: str) -> Adapter:
    return read_adapter(user_path(path), config, translation)


def _forward(
    files: ModelFiles,
    options: ExecutorOptions,
    checkpoint: ModelCheckpoint | None = None,
    scales: KeyScales | None = None,
) -> Forward:
    """Builds the forward pass of a model, whose weights are opened here unless `checkpoint` is given. `scales`: see
    `NativeProgram`. Raises `ModelError` or `ConfigError`."""
    checkpoint = checkpoint or open_checkpoint(files)
    longest = checkpoint.config.max_context
    config = checkpoint.config.within(min(options.context or longest, longest))
    if not options.predictor:
        config = replace(config, predictor=())
    forward = _native_forward(config, files, checkpoint, options, scales)
    return forward if forward is not None else _torch_forward(config, files, checkpoint, options)


def _differing(first: ModelConfig, second: ModelConfig) -> list[str]:
    """Returns the fields in which two models compute differently, ignoring those that describe storage or tokens."""
    stored = ("dtype", "eos", "bos", "max_context")
    names = [each.name for each in fields(ModelConfig) if each.name not in stored]
    return [name for name in names if getattr(first, name) != getattr(second, name)]


def _torch_forward(
    config: ModelConfig, files: ModelFiles, checkpoint: ModelCheckpoint, options: ExecutorOptions
) -> Forward:
    from tenuto.exec.parallel.forward import parallel_forward  # noqa: PLC0415 - needs torch
    from tenuto.exec.torch_load import Part, torch_forward  # noqa: PLC0415 - needs torch, which takes a second

    part = Part(files, config, options.page_size, options.device, options.dtype, options.kernels)
    if options.tensor_parallel > 1:
        return parallel_forward(part, options.tensor_parallel, checkpoint)
    return torch_forward(part, weights_of(checkpoint, config))


def _native_forward(
    config: ModelConfig,
    files: ModelFiles,
    checkpoint: ModelCheckpoint,
    options: ExecutorOptions,
    scales: KeyScales | None,
) -> Forward | None:
    """Builds the forward pass with native kernels; None if plain PyTorch must compute."""
    device, dtype, kernels, cache = options.device, options.dtype, options.kernels, options.cache
    apart = options.tensor_parallel > 1
    if kernels == "torch" or not is_cpu(device) or dtype not in (None, "bfloat16") or cache is None or apart:
        if kernels in VARIANTS:
            raise ConfigError(
                f"kernels {kernels!r} need a cache to be compiled into, and are for the CPU, dtype bfloat16 and one "
                f"process; here: {device}, {dtype}, {options.tensor_parallel}"
            )
        _refuse(options, f"they are for the CPU and dtype bfloat16; here: {kernels}, {device}, {dtype}")
        return None
    try:
        found = _native(config, cache, options)
        with interleaved(options.nodes):
            packed = _packed(config, files, checkpoint, options, scales)
        forward = NativeForward(found, packed, threads=usable_cores())
    except Unavailable as reason:
        if kernels != "auto":
            raise ConfigError(f"kernels {kernels!r} cannot be used: {reason}") from reason
        _refuse(options, str(reason))
        options.say(f"Plain PyTorch computes: {reason}")
        return None
    several = len(options.nodes) > 1 and forward.threads == sum(len(node.cores) for node in options.nodes)
    if several and not forward.pin(options.nodes):  # fewer threads than cores go where cores are free
        options.say("The system does not let threads be kept on memory nodes")
    return forward


def _refuse(options: ExecutorOptions, reason: str) -> None:
    """Raises `ConfigError` if there are options that need native kernels. `reason`: why these cannot compute."""
    if options.kv_cache_dtype != KVCacheDtype.AUTO:
        raise ConfigError(
            f"kv_cache_dtype is {options.kv_cache_dtype!r}, which needs native kernels: {reason}; allowed with "
            f"plain PyTorch: {KVCacheDtype.AUTO.value}"
        )
    if options.share_weights:
        raise ConfigError(f"share_weights needs native kernels: {reason}; allowed with plain PyTorch: false")


def _native(config: ModelConfig, cache: Path, options: ExecutorOptions) -> Library:
    reason = obstacle(config)
    if reason is not None:
        raise Unavailable(f"the native kernels cannot run this model: {reason}")
    machine, kernels = options.machine, options.kernels
    failed = Unavailable("this CPU has neither AVX2 nor NEON")
    for variant in machine.variants() if kernels == "auto" else [kernels]:
        try:
            return loaded(library(cache, machine, variant, options.say))
        except Unavailable as error:  # the compiler or the system may not support the best one
            failed = error
    raise failed


def _packed(
    config: ModelConfig,
    files: ModelFiles,
    checkpoint: ModelCheckpoint,
    options: ExecutorOptions,
    scales: KeyScales | None,
) -> NativeProgram:
    kv_type, plain = KVCacheDtype(options.kv_cache_dtype), options.dtype is not None

    def program(memory: WeightMemory) -> NativeProgram:
        weights = weights_of(checkpoint, config)
        return NativeProgram(
            config, weights, options.page_size, plain=plain, kv_cache_dtype=kv_type, scales=scales, memory=memory
        )

    try:
        if not options.share_weights or options.cache is None:
            return program(PrivateMemory())
        given = scales.digest if scales is not None and kv_type.scaled_keys else None
        key = repr((WeightsDigest(files).stamps, config, plain, kv_type, given, _sources()))
        with shared_memory(options.cache / "weights", sha256(key.encode()).hexdigest()) as memory:
            return program(memory)
    except OSError as error:
        raise ConfigError(f"there is no memory for the model's weights: {error}") from error


def _sources() -> bytes:
    """Returns a digest of the code that packs weights."""
    digest = sha256()
    for directory in (native.__path__[0], models.__path__[0]):
        for path in sorted(Path(directory).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.digest()
