"""Matrices in safetensors files that GPTQ, AWQ, compressed-tensors or transformers' FP8 have quantized.

They keep their bits: a matrix's parts are rearranged as `Grouped` has them when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import ModelError
from tenuto.formats.safetensors_file import SafeTensor
from tenuto.kernels.native.formats import PanelFormat
from tenuto.kernels.native.grouped import BLOCK, Grouped, in_halves
from tenuto.models.settings import Settings
from tenuto.models.weights import Bytes, Floats, Longs, StoredWeight

Numbers = npt.NDArray[Any]

_DTYPES = {
    "F8_E4M3": np.uint8,
    "I8": np.int8,
    "I32": np.uint32,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": np.uint16,
    "F32": np.float32,
}
_SIGNED = {"I32": np.int32, "I64": np.int64}
_FLOATS = ("F16", "BF16", "F32")
_IGNORED = (".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
"""Scales of activations and of a KV cache. Ours have scales of their own, for fewer values each."""
_INTEGERS = {4: PanelFormat.INT4, 8: PanelFormat.INT8}


class Parts:
    """The parts of the quantized matrix of `module`, by their names behind its own. All methods raise `ModelError`."""

    def __init__(self, module: str, tensors: Mapping[str, SafeTensor]) -> None:
        self.module = module
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str, *dtypes: str) -> tuple[int, ...]:
        """Returns the shape of a part, which must be of one of `dtypes`."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"the model's files lack {self.module}{name}, a part of a quantized matrix")
        if tensor.dtype not in dtypes:
            raise ModelError(f"tensor {self.module}{name} is of type {tensor.dtype}; supported: {', '.join(dtypes)}")
        return tensor.shape

    def expect(self, name: str, *shape: int) -> None:
        """Checks the shape of a part."""
        found = self._tensors[name].shape
        if found != shape:
            raise ModelError(f"tensor {self.module}{name} is of shape {list(found)}; expected: {list(shape)}")

    def array(self, name: str) -> Numbers:
        """Returns a part's elements; bfloat16 becomes float32, and FP8 stays as bytes."""
        tensor = self._tensors[name]
        found: Numbers = tensor.span.data().view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
        if tensor.dtype != "BF16":
            return found
        return (found.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def order(self, name: str, inputs: int, group: int) -> Longs | None:
        """Returns the order in which inputs of the same group are neighbours, int64 [inputs]; `None` if they are
        neighbours already. `name`: the part with the group of each input, if there is one (`desc_act`, `actorder`)."""
        if name not in self:
            return None
        self.shape(name, "I32", "I64")
        self.expect(name, inputs)
        groups, sorted_groups = self.array(name).view(_SIGNED[self._tensors[name].dtype]), np.arange(inputs) // group
        if np.array_equal(groups, sorted_groups):
            return None
        order = np.argsort(groups, kind="stable")
        if not np.array_equal(groups[order], sorted_groups):
            raise ModelError(
                f"tensor {self.module}{name} has the numbers of groups of {inputs} inputs; expected: each of 0 to "
                f"{inputs // group - 1} {group} times"
            )
        return order.astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True)
class Method:
    """A method of quantization. `parts` are the names of a matrix's parts behind its module's; modules with one of
    `marks` have a quantized matrix, which `matrix` builds."""

    marks: tuple[str, ...]
    parts: tuple[str, ...]
    matrix: Callable[[Parts], StoredWeight]

    def tensors(self, stored: Mapping[str, SafeTensor]) -> Iterator[tuple[str, SafeTensor | StoredWeight]]:
        """Yields the tensors of a model's files, with quantized matrices in place of their parts."""
        modules = {name.removesuffix(mark) for name in stored for mark in self.marks if name.endswith(mark)}
        for module in modules:
            tensors = {part: stored[module + part] for part in self.parts if module + part in stored}
            yield f"{module}.weight", self.matrix(Parts(module, tensors))
        taken = {module + part for module in modules for part in self.parts}
        for name, tensor in stored.items():
            if name not in taken and not name.endswith(_IGNORED):
                yield name, tensor


def _gptq(settings: Settings) -> Method:
    """GPTQ (arXiv:2210.17323). Layout and zeros: `pack` in `nn_modules/qlinear` of GPTQModel; the original format
    stores each zero less one."""
    _only(settings, "bits", *_INTEGERS)
    _only(settings, "checkpoint_format", None, "gptq", "gptq_v2")
    bits, less = settings.get("bits", int), settings.optional("checkpoint_format", str) != "gptq_v2"

    def matrix(parts: Parts) -> StoredWeight:
        rows, outputs = _two(parts, ".qweight", "I32")
        groups, inputs = _two(parts, ".scales", *_FLOATS)[0], rows * 32 // bits
        group = _group(parts, inputs, groups)
        parts.expect(".scales", groups, outputs)
        parts.shape(".qzeros", "I32")
        parts.expect(".qzeros", groups, outputs * bits // 32)
        order = parts.order(".g_idx", inputs, group)

        def scales() -> tuple[Floats, Floats]:
            zeros = (_unpacked(parts.array(".qzeros"), bits) + np.uint8(less)) & np.uint8(2**bits - 1)
            return parts.array(".scales").T.astype(np.float32), zeros.T.astype(np.float32)

        def quants() -> Bytes:
            return _unpacked(parts.array(".qweight").T, bits)

        return _grouped(_INTEGERS[bits], (outputs, inputs), group, quants, scales, order)

    return Method((".qweight",), (".qweight", ".qzeros", ".scales", ".g_idx"), matrix)


_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place, in a word, of each of eight outputs."""


def _awq(settings: Settings) -> Method:
    """AWQ (arXiv:2306.00978). Layout: `WQLinear_GEMM` in `awq/modules/linear/gemm.py` of AutoAWQ."""
    _only(settings, "bits", 4)
    _only(settings, "version", None, "gemm")

    def matrix(parts: Parts) -> StoredWeight:
        inputs, words = _two(parts, ".qweight", "I32")
        outputs, groups = words * 8, _two(parts, ".scales", *_FLOATS)[0]
        group = _group(parts, inputs, groups)
        parts.expect(".scales", groups, outputs)
        if ".qzeros" in parts:
            parts.shape(".qzeros", "I32")
            parts.expect(".qzeros", groups, words)

        def ordered(name: str) -> Bytes:
            found = _unpacked(parts.array(name), 4)
            return found.reshape(len(found), -1, 8)[..., _AWQ_ORDER].reshape(found.shape).T

        def scales() -> tuple[Floats, Floats]:
            found = parts.array(".scales").T.astype(np.float32)
            return found, ordered(".qzeros").astype(np.float32) if ".qzeros" in parts else np.full_like(found, 8)

        return _grouped(PanelFormat.INT4, (outputs, inputs), group, lambda: ordered(".qweight"), scales)

    return Method((".qweight",), (".qweight", ".qzeros", ".scales"), matrix)


def _compressed(settings: Settings) -> Method:
    """compressed-tensors: integers of 4 bits in words, integers of 8 bits, and FP8. Layout: `compressors` of
    https://github.com/vllm-project/compressed-tensors."""
    formats = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
    _only(settings, "format", None, *formats)
    if sparsity := settings.part("sparsity_config"):
        _only(sparsity, "format", None, "dense")
    of_weights = [weights for group in settings.parts("config_groups") if (weights := group.part("weights"))]
    sides = next((found for weights in of_weights if (found := _sides(weights, "block_structure"))), None)

    def matrix(parts: Parts) -> StoredWeight:
        return _packed_words(parts) if ".weight_packed" in parts else _bytes(parts, ".weight_scale", sides)

    names = ("packed", "shape", "scale", "zero_point", "g_idx")
    return Method((".weight_packed", ".weight_scale"), (".weight", *(f".weight_{name}" for name in names)), matrix)


def _packed_words(parts: Parts) -> StoredWeight:
    """Returns a matrix of integers in words, eight or four each: signed, but stored as unsigned."""
    parts.shape(".weight_shape", "I64", "I32")
    outputs, inputs = (int(size) for size in parts.array(".weight_shape").reshape(-1))
    words = _two(parts, ".weight_packed", "I32")[1]
    bits = 32 * words // max(inputs, 1)
    if bits not in _INTEGERS:
        raise ModelError(f"{parts.module} has {bits} bits a weight; supported: {', '.join(map(str, _INTEGERS))}")
    parts.expect(".weight_packed", outputs, -(-inputs * bits // 32))
    groups = _two(parts, ".weight_scale", *_FLOATS)[1]
    group = _group(parts, inputs, groups)
    parts.expect(".weight_scale", outputs, groups)
    order = parts.order(".weight_g_idx", inputs, group)
    if ".weight_zero_point" in parts:
        parts.shape(".weight_zero_point", "I32")
        parts.expect(".weight_zero_point", -(-outputs * bits // 32), groups)

    def scales() -> tuple[Floats, Floats]:
        found = parts.array(".weight_scale").astype(np.float32)
        if ".weight_zero_point" not in parts:
            return found, np.full_like(found, 2 ** (bits - 1))
        return found, _unpacked(parts.array(".weight_zero_point").T, bits).T[:outputs].astype(np.float32)

    def quants() -> Bytes:
        return _unpacked(parts.array(".weight_packed"), bits)

    return _grouped(_INTEGERS[bits], (outputs, inputs), group, quants, scales, order)


def _fine_grained(settings: Settings) -> Method:
    """FP8 with a scale for each square of weights: `FineGrainedFP8Config` of transformers."""
    sides = _sides(settings, "weight_block_size")

    def matrix(parts: Parts) -> StoredWeight:
        return _bytes(parts, ".weight_scale_inv", sides)

    return Method((".weight_scale_inv",), (".weight", ".weight_scale_inv"), matrix)


def _only(settings: Settings, key: str, *allowed: object) -> None:
    """Raises `ModelError` unless the value under `key` is one of those allowed; `None` stands for a missing one."""
    value = settings.optional(key, object)
    if value not in allowed:
        supported = ", ".join(str(each) for each in allowed if each is not None)
        raise ModelError(f"{settings.source} has {key} = {value!r} in its quantization_config; supported: {supported}")


def _sides(settings: Settings, key: str) -> list[int] | None:
    """Returns the numbers of outputs and inputs that share a scale, if the settings have them."""
    sides = settings.optional(key, list)
    if sides is not None and not (len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)):
        raise ModelError(f"{settings.source} has {key} {sides}; allowed: two whole numbers of at least 1")
    return sides


def _bytes(parts: Parts, scale: str, sides: list[int] | None) -> StoredWeight:
    """Returns a matrix of bytes, signed integers or FP8. Scales are those of the whole, of outputs, of groups of an
    output's inputs, or of blocks of a number of outputs and inputs, `sides`."""
    outputs, inputs = _two(parts, ".weight", "I8", "F8_E4M3")
    shape, zero = parts.shape(scale, *_FLOATS), ".weight_zero_point"
    rows, groups = (*shape, 1, 1)[:2]
    if sides is not None and (rows, groups) == (-(-outputs // sides[0]), -(-inputs // sides[1])):
        tall, group = sides
    elif rows in (1, outputs) and len(shape) < 3:
        tall, group = outputs // rows, _group(parts, inputs, groups)
    else:
        raise ModelError(f"{parts.module} is of shape {[outputs, inputs]}, but its scales of {list(shape)}")
    if zero in parts:
        parts.shape(zero, "I8")
        parts.expect(zero, *shape)

    def whole(values: Numbers) -> Floats:
        """Returns a value for each output and group."""
        return np.repeat(values.reshape(rows, groups).astype(np.float32), tall, axis=0)[:outputs]

    if parts.array(".weight").dtype == np.int8:

        def scales() -> tuple[Floats, Floats]:
            found = whole(parts.array(scale))
            return found, whole(parts.array(zero)) + 128 if zero in parts else np.full_like(found, 128)

        def quants() -> Bytes:
            found: Bytes = parts.array(".weight").view(np.uint8) ^ np.uint8(0x80)
            return found

        return _grouped(PanelFormat.INT8, (outputs, inputs), group, quants, scales)

    def floats() -> Bytes:
        found: Bytes = parts.array(".weight")
        if ((found & 0x7F) == 0x7F).any():
            raise ModelError(f"{parts.module}.weight has values that are not numbers; fetch the model again")
        return found

    return _grouped(PanelFormat.FP8, (outputs, inputs), group, floats, lambda: (whole(parts.array(scale)), None))


def _two(parts: Parts, name: str, *dtypes: str) -> tuple[int, int]:
    """Returns the shape of a part with two dimensions."""
    shape = parts.shape(name, *dtypes)
    if len(shape) != 2:
        raise ModelError(f"tensor {parts.module}{name} is of shape {list(shape)}; expected: two dimensions")
    return shape[0], shape[1]


def _group(parts: Parts, inputs: int, groups: int) -> int:
    """Returns the number of inputs in a group."""
    if inputs % groups or inputs // groups % BLOCK:
        raise ModelError(
            f"{parts.module} has {groups} scales for {inputs} inputs; supported: one for a multiple of {BLOCK} inputs"
        )
    return inputs // groups


def _unpacked(words: Numbers, bits: int) -> Bytes:
    """Splits uint32 [rows, words] into numbers of 4 or 8 bits, the lowest first: uint8 [rows, numbers]."""
    each = np.ascontiguousarray(words).view(np.uint8)
    return each if bits == 8 else np.stack((each & 15, each >> 4), axis=-1).reshape(len(each), -1)


def _grouped(
    numbers: PanelFormat,
    shape: tuple[int, int],
    group: int,
    quants: Callable[[], Bytes],
    scales: Callable[[], tuple[Floats, Floats | None]],
    order: Longs | None = None,
) -> StoredWeight:
    """Returns a matrix. `quants` returns its numbers, uint8 of `shape`. `scales` returns scales and zeros, float32
    [outputs, groups], for groups of `group` inputs; FP8 has no zeros. `order`: as in `StoredWeight`; the columns of
    `quants` are brought into it."""
    inputs = shape[1]
    if inputs % BLOCK or group % BLOCK:
        raise ModelError(f"quantized weights of {inputs} inputs in groups of {group}; supported: multiples of {BLOCK}")
    blocks = group // BLOCK
    shared = group if group >= inputs else BLOCK * gcd(blocks, 2 ** blocks.bit_length())
    found, zeros = scales()
    with np.errstate(over="ignore"):
        exact = np.array_equal(found.astype(np.float16).astype(np.float32), found)
    signed = zeros is not None and bool((zeros == (8 if numbers is PanelFormat.INT4 else 128)).all())
    kind = Grouped(numbers, shared, exact and signed)

    def read() -> Bytes:
        found, zeros = scales()
        count = -(-inputs // shared)
        arrays = [found] if zeros is None else [found, -zeros * found]
        each = [np.repeat(values, -(-group // shared), axis=1)[:, :count] for values in arrays]
        stored = quants() if order is None else quants()[:, order]
        data = in_halves(stored) if numbers is PanelFormat.INT4 else stored
        return np.concatenate((data, *(np.ascontiguousarray(values).view(np.uint8) for values in each)), axis=1)

    return StoredWeight(kind, shape, read, order)


METHODS: dict[str, Callable[[Settings], Method]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fine_grained,
}
"""Methods by their names in `quantization_config`."""
