"""From a model's files to an executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tenuto.base.errors import ConfigError
from tenuto.exec.device import check_device, is_cpu, usable_cores
from tenuto.exec.forward import Forward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.kernels.elements import Element
from tenuto.kernels.native.build import VARIANTS, Machine, Unavailable, library
from tenuto.kernels.native.library import Library, loaded
from tenuto.models.checkpoint import open_checkpoint
from tenuto.models.config import ModelConfig
from tenuto.models.native.obstacle import obstacle
from tenuto.models.native.program import NativeProgram
from tenuto.models.store import ModelFiles
from tenuto.models.weights import StoredWeight

Weights = Iterable[tuple[str, StoredWeight]]
KERNELS = ("auto", *VARIANTS, "torch")
"""What may compute: the best there is, one variant of the native kernels, or plain PyTorch."""


def load_executor(
    files: ModelFiles,
    page_size: int,
    device: str = "cpu",
    dtype: str | None = None,
    *,
    context: int | None = None,
    kernels: str = "auto",
    cache: Path | None = None,
    machine: Machine | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> ModelExecutor:
    """Read a model and make an executor for it, not yet prepared.

    `dtype` is an `Element`. `None` is, with native kernels, weights as they are stored; without them float32 on a
    CPU, and elsewhere bfloat16. `context` is how many tokens a session may have, the model's own limit if it is not
    given: some models rotate queries and keys otherwise where contexts are long. `kernels` is one of `KERNELS`; native
    ones are compiled into `cache`; without it there are none. `say` is told before kernels are compiled, which takes
    some seconds, and why plain PyTorch computes if it was not asked for. Raises `ModelError` for the files and
    `ConfigError` for what cannot be used together.
    """
    check_device(device)
    if dtype is not None and dtype not in list(Element):
        raise ConfigError(f"dtype is {dtype!r}; allowed: {', '.join(Element)}")
    if kernels not in KERNELS:
        raise ConfigError(f"kernels are {kernels!r}; allowed: {', '.join(KERNELS)}")
    checkpoint = open_checkpoint(files)
    longest = checkpoint.config.max_context
    config = checkpoint.config.within(min(context or longest, longest))
    wanted = kernels != "torch" and is_cpu(device) and dtype in (None, "bfloat16") and cache is not None
    if kernels in VARIANTS and not wanted:
        raise ConfigError(
            f"kernels {kernels!r} need a cache to be compiled into, and are for the CPU and dtype bfloat16; "
            f"here: {device}, {dtype}"
        )
    forward: Forward | None = None
    if wanted and cache is not None:
        try:
            found = _native(config, cache, machine or Machine.this(), kernels, say)
            forward = NativeForward(
                found, _packed(config, checkpoint.weights(), page_size, dtype), threads=usable_cores()
            )
        except Unavailable as reason:
            if kernels != "auto":
                raise ConfigError(f"kernels {kernels!r} cannot be used: {reason}") from reason
            say(f"Plain PyTorch computes: {reason}")
    if forward is None:
        forward = _torch_forward(config, checkpoint.weights(), page_size, device, dtype)
    return ModelExecutor(forward)


def _torch_forward(config: ModelConfig, weights: Weights, page_size: int, device: str, dtype: str | None) -> Forward:
    import torch  # noqa: PLC0415 - takes a second or more, and the native kernels do without it

    from tenuto.exec.torch_forward import TorchForward  # noqa: PLC0415 - likewise
    from tenuto.models.decoder import Decoder  # noqa: PLC0415 - likewise

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
    for variant in machine.variants():  # the compiler may not know the best, or the system not permit it
        try:
            return loaded(library(cache, machine, variant, say))
        except Unavailable as error:
            failed = error
    raise failed


def _packed(config: ModelConfig, weights: Weights, page_size: int, dtype: str | None) -> NativeProgram:
    try:
        return NativeProgram(config, weights, page_size, plain=dtype is not None)
    except OSError as error:
        raise ConfigError(f"there is no memory for the model's weights: {error}") from error
