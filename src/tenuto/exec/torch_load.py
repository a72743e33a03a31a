"""Builds forward passes in PyTorch, with our own kernels on GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tenuto.exec.device import is_cpu
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.elements import Element
from tenuto.kernels.fused import compiles
from tenuto.models.config import ModelConfig
from tenuto.models.decoder import Decoder
from tenuto.models.shards import ALONE, Ranks
from tenuto.models.store import ModelFiles
from tenuto.models.weights import StoredWeight


@dataclass(frozen=True, slots=True)
class Part:
    """A model, or a part of one, and how it is computed; see `ExecutorOptions`."""

    files: ModelFiles
    config: ModelConfig
    page_size: int
    device: str
    dtype: str | None
    kernels: str

    @property
    def element(self) -> Element:
        """The element type of weights, keys and values."""
        return Element(self.dtype or (Element.FLOAT32 if is_cpu(self.device) else Element.BFLOAT16))


def torch_forward(part: Part, weights: Iterable[tuple[str, StoredWeight]], ranks: Ranks = ALONE) -> TorchForward:
    """Builds a forward pass of the model, or of this rank's part, to which `config` and `weights` belong. Raises
    `ModelError`."""
    dtype, device = getattr(torch, part.element), torch.device(part.device)
    if part.kernels == "torch" or not compiles(device):
        return TorchForward(Decoder(part.config, weights, device, dtype, ranks=ranks), part.page_size)
    from tenuto.exec.gpu.forward import GpuForward  # noqa: PLC0415 - needs Triton
    from tenuto.exec.gpu.queue import CudaQueue  # noqa: PLC0415
    from tenuto.kernels.gpu.fused import FUSED  # noqa: PLC0415

    decoder = Decoder(part.config, weights, device, dtype, FUSED, ranks)
    return GpuForward(decoder, part.page_size, CudaQueue(device))
