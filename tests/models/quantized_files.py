"""Quantizes the linear layers of a Hugging Face directory as other tools store them, by plain rounding.

Each maker returns a matrix's parts, by their names behind the module's, and the weights that they stand for, float32
[outputs, inputs], by the formula of the tool's own decoding (see `tenuto.models.quantized` for the sources).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tenuto.kernels.native.formats import PanelFormat

Made = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Quantization:
    """A way to quantize: `config`, the model's `quantization_config`, and `make`, which quantizes one matrix. `order`:
    of inputs, in which those of a group are neighbours."""

    config: dict[str, Any]
    make: Callable[[torch.Tensor], Made]
    order: torch.Tensor | None = None


def rounded(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds float32 [outputs, inputs] to unsigned numbers, int64 of that shape. Returns them, scales of `dtype` and
    zeros, int64, both [outputs, groups]."""
    groups, most = weight.unflatten(1, (-1, group)), 2**bits - 1
    if symmetric:
        scales = (groups.abs().amax(dim=2) / (most // 2)).to(dtype)
        zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.int64)
    else:
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scales = ((high - low) / most).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, most).long()
    numbers = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most)
    return numbers.long().flatten(1), scales, zeros


def decoded(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    each = numbers.shape[1] // scales.shape[1]
    return (numbers - zeros.repeat_interleave(each, 1)) * scales.float().repeat_interleave(each, 1)


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs numbers, int64 [rows, columns], into int32 [rows, columns * bits / 32], the first lowest."""
    shifts = torch.arange(0, 32, bits)
    return (numbers.unflatten(1, (-1, 32 // bits)) << shifts).sum(dim=2).to(torch.int32)


def gptq(
    bits: int, group: int, *, symmetric: bool, version: str = "gptq", order: torch.Tensor | None = None
) -> Quantization:
    """`order`: of inputs, in which those of a group are neighbours."""

    def make(weight: torch.Tensor) -> Made:
        size = group if group > 0 else weight.shape[1]
        by_group = order if order is not None else torch.arange(weight.shape[1])
        numbers, scales, zeros = rounded(weight[:, by_group], bits, size, symmetric=symmetric, dtype=torch.float16)
        back = by_group.argsort()
        stored = (zeros - int(version == "gptq")) % 2**bits
        parts = {
            "qweight": words(numbers[:, back], bits).T,
            "qzeros": words(stored.T, bits),
            "scales": scales.T,
            "g_idx": (back // size).int(),
        }
        return parts, decoded(numbers, scales, zeros)[:, back]

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": version}
    return Quantization(config | {"desc_act": order is not None}, make, order)


def awq(group: int) -> Quantization:
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # of the outputs in a word

    def packed(values: torch.Tensor) -> torch.Tensor:
        return words(values.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    def make(weight: torch.Tensor) -> Made:
        numbers, scales, zeros = rounded(weight, 4, group, symmetric=False, dtype=torch.float16)
        parts = {"qweight": packed(numbers.T), "qzeros": packed(zeros.T), "scales": scales.T}
        return parts, decoded(numbers, scales, zeros)

    return Quantization(
        {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}, make
    )


def _compressed(stored: str, make: Callable[[torch.Tensor], Made], **weights: Any) -> Quantization:
    scheme = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": scheme},
        "ignore": [],
        "quantization_status": "compressed",
    }
    return Quantization(config, make)


def packed_words(
    bits: int,
    group: int,
    *,
    symmetric: bool,
    dtype: torch.dtype = torch.bfloat16,
    order: torch.Tensor | None = None,
) -> Quantization:
    """Integers in words, by compressed-tensors. `order` as in `gptq`."""

    def make(weight: torch.Tensor) -> Made:
        by_group = order if order is not None else torch.arange(weight.shape[1])
        numbers, scales, zeros = rounded(weight[:, by_group], bits, group, symmetric=symmetric, dtype=dtype)
        back = by_group.argsort()
        parts = {
            "weight_packed": words(numbers[:, back], bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.T, bits).T
        if order is not None:
            parts["weight_g_idx"] = (back // group).int()
        return parts, decoded(numbers, scales, zeros)[:, back]

    found = _compressed(
        "pack-quantized",
        make,
        actorder="group" if order is not None else None,
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="group",
        group_size=group,
    )
    return replace(found, order=order)


def whole_bytes(strategy: str, group: int = 0, *, symmetric: bool = True) -> Quantization:
    """Integers of 8 bits, by compressed-tensors."""

    def make(weight: torch.Tensor) -> Made:
        size = group or weight.shape[1]
        source = weight if strategy != "tensor" else weight.reshape(1, -1)
        numbers, scales, zeros = rounded(
            source, 8, source.shape[1] if strategy == "tensor" else size, symmetric=symmetric, dtype=torch.bfloat16
        )
        parts = {"weight": (numbers - 128).to(torch.int8).reshape(weight.shape), "weight_scale": scales}
        if not symmetric:
            parts["weight_zero_point"] = (zeros - 128).to(torch.int8)
        if strategy == "tensor":
            parts["weight_scale"] = scales.reshape(1)
        return parts, decoded(numbers, scales, zeros).reshape(weight.shape)

    more = {"group_size": group} if group else {}
    return _compressed("int-quantized", make, num_bits=8, type="int", symmetric=symmetric, strategy=strategy, **more)


def fp8(strategy: str, dtype: torch.dtype = torch.float32) -> Quantization:
    """Floats of 8 bits, by compressed-tensors: with scales of outputs, of the whole, or of squares of 64."""

    def make(weight: torch.Tensor) -> Made:
        outputs, inputs = weight.shape
        tall, wide = {"channel": (1, inputs), "tensor": (outputs, inputs), "block": (64, 64)}[strategy]
        scales = torch.nn.functional.max_pool2d(weight.abs()[None], (tall, wide), ceil_mode=True)[0] / 448
        scales = scales.to(dtype)
        each = scales.float().repeat_interleave(tall, 0).repeat_interleave(wide, 1)[:outputs, :inputs]
        numbers = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = scales.reshape(1) if strategy == "tensor" else scales
        return {"weight": numbers, "weight_scale": stored}, numbers.float() * each

    more = {"block_structure": [64, 64]} if strategy == "block" else {}
    return _compressed("float-quantized", make, num_bits=8, type="float", symmetric=True, strategy=strategy, **more)


def fine_grained() -> Quantization:
    """Floats of 8 bits with scales of squares of 64, as transformers stores them."""

    def make(weight: torch.Tensor) -> Made:
        parts, expected = fp8("block").make(weight)
        return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"]}, expected

    return Quantization({"quant_method": "fp8", "weight_block_size": [64, 64]}, make)


OF_DIRECTORIES = {
    PanelFormat.INT4: gptq(4, 128, symmetric=False),
    PanelFormat.INT8: whole_bytes("channel", symmetric=False),
    PanelFormat.FP8: fp8("block"),
}
"""For each panel format that no type of GGUF files has: a quantization that becomes it."""


def quantize_directory(directory: Path, quantization: Quantization) -> dict[str, torch.Tensor]:
    """Quantizes all matrices of a directory but the embedding. Returns the weights they stand for, by their names."""
    file, config = directory / "model.safetensors", directory / "config.json"
    stored, expected = {}, {}
    for name, tensor in load_file(file).items():
        if tensor.dim() != 2 or "embed_tokens" in name:
            stored[name] = tensor
            continue
        parts, expected[name] = quantization.make(tensor.float())
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(stored, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization.config}))
    return expected
