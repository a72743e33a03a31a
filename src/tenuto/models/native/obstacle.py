"""Limits of the native kernels: which models they cannot run."""

from __future__ import annotations

from collections.abc import Iterator

from tenuto.kernels.native.pack import LANES
from tenuto.models.config import Attention, Experts, GatedDelta, Layer, Mamba, Mamba2, Mlp, ModelConfig

MAX_HEAD_DIM = 1024
"""Largest supported head; the size of arrays in `attention_layer.h`."""


def obstacle(config: ModelConfig) -> str | None:
    """Returns the reason why the native kernels cannot run a model of this shape, or `None` if they can."""
    if any(isinstance(mixer, Mamba) for mixer in config.mixers):
        return "it has layers of Mamba, which they do not compute, only those of Mamba-2"
    sizes = dict.fromkeys(size for _, layer in config.named_layers() for size in _sizes(layer))
    odd = [f"{name} {size}" for name, size in (*sizes, ("hidden", config.hidden)) if size % LANES]
    if odd:
        return f"its {', '.join(odd)} is not a multiple of {LANES}"
    long = [size for name, size in sizes if name == "head_dim" and size > MAX_HEAD_DIM]
    if long:
        return f"its head_dim {max(long)} is more than {MAX_HEAD_DIM}"
    if config.state_dtype != "float32":
        return f"its recurrent states are in {config.state_dtype}"
    return None


def _sizes(layer: Layer) -> Iterator[tuple[str, int]]:
    """Yields the sizes that must be multiples of 16, with their names."""
    for mixer in layer.mixers:
        match mixer:
            case Attention() as a:
                yield "head_dim", a.head_dim
            case Mamba():
                pass  # `obstacle` has rejected it
            case Mamba2() as m:
                yield "Mamba-2 head", m.head_dim
                yield "convolution", m.convolved
                yield "Mamba-2 group", m.channels // m.groups
            case GatedDelta() as d:
                yield "value head", d.value_dim
                yield "convolution", d.convolved
    match layer.feed_forward:
        case Mlp() as mlp:
            yield "ffn", mlp.width
        case Experts() as e:
            yield "expert", e.width
            yield "shared expert", e.shared
