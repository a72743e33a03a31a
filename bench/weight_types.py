"""`python -m bench.weight_types`: the cost, for one core, of two layers in every type of weight that the kernels keep.

The layers have the shape of Llama 3.1 8B's, and random weights, which are rounded to each type. A decode takes at least
the time for reading the weights once; this limit is measured in the same run, by PyTorch reading as many bytes. A
prefill takes at least the time for multiplying at the rate of the CPU's instructions in registers
(`bench.multiplications`). Figures are CPU times of the fastest of several steps, so that they mean something on a busy
machine, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from bench.kernels import Steps, prefill_multiplications
from bench.multiplications import multiplications
from tenuto.base.config import cache_dir
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.kernels.native.build import Machine, library
from tenuto.kernels.native.formats import FORMATS, PanelFormat
from tenuto.kernels.native.grouped import Grouped, in_halves
from tenuto.kernels.native.library import loaded
from tenuto.models.adapter import projections
from tenuto.models.config import Attention, Layer, Mlp, ModelConfig
from tenuto.models.native.program import NativeProgram
from tenuto.models.weights import Bytes, Floats, StoredWeight
from tests.models.quantize import quantize

Make = Callable[[Floats], StoredWeight]
"""Rounds float32 [outputs, inputs] to a type."""

GROUP = 64
"""Inputs that share a scale in the types of safetensors files, unless those of an output do."""
DECODES = (1, 4, 16)
PREFILL = 128
_HEADS, _KV_HEADS, _HEAD_DIM, _WIDTH, _VOCAB = 32, 8, 128, 14336, 256
_HIDDEN = _HEADS * _HEAD_DIM
_ROWS = 256  # made and then repeated


def _plain(kind: Kind, values: Floats) -> StoredWeight:
    bits = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return StoredWeight.of(bits if kind is Kind.BF16 else values.astype(np.float16), kind)


def _quantized(kind: Kind, values: Floats) -> StoredWeight:
    data = quantize(values, kind).view(np.uint8)
    return StoredWeight(kind, values.shape, lambda: data)


def _integers(numbers: PanelFormat, group: int, values: Floats) -> StoredWeight:
    """Rounds to unsigned integers with a scale and a zero for each group of inputs; a `group` of 0 is all of them."""
    most = 15 if numbers is PanelFormat.INT4 else 255
    size = group or values.shape[1]
    groups = values.reshape(len(values), -1, size)
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    scales = (high - low) / most
    zeros = np.rint(-low / scales)
    quants = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, most).astype(np.uint8)
    data = quants.reshape(values.shape)
    return _grouped(Grouped(numbers, size), values, in_halves(data) if most == 15 else data, scales, -zeros * scales)


def _fp8(values: Floats) -> StoredWeight:
    scales = np.abs(values).max(axis=1, keepdims=True) / 448
    bits = torch.from_numpy(values / scales).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return _grouped(Grouped(PanelFormat.FP8, values.shape[1]), values, bits, scales)


def _grouped(kind: Grouped, values: Floats, quants: Bytes, *arrays: Floats) -> StoredWeight:
    behind = [np.ascontiguousarray(each, np.float32).view(np.uint8) for each in arrays]
    data = np.concatenate((quants, *behind), axis=1)
    return StoredWeight(kind, values.shape, lambda: data)


TYPES: dict[str, tuple[int, Make]] = {
    **{kind.name: (GGML_QUANT_SIZES[kind][0], partial(_quantized, kind)) for kind in FORMATS},
    "INT4": (GROUP, partial(_integers, PanelFormat.INT4, GROUP)),
    "INT8": (32, partial(_integers, PanelFormat.INT8, 0)),
    "FP8": (32, _fp8),
    "BF16": (1, partial(_plain, Kind.BF16)),
    "F16": (1, partial(_plain, Kind.F16)),
}
"""For each type, the number of which a row's length must be a multiple, and how weights are rounded to it. INT4 stands
for GPTQ, AWQ and compressed-tensors with zeros; without them they have the arithmetic of Q4_0 and Q8_0."""


def two_layers() -> ModelConfig:
    """Returns a model of two layers. In a prefill, the second one's feed-forward network computes only one token."""
    mixer = Attention(_HEADS, _KV_HEADS, _HEAD_DIM, None, _HEAD_DIM**-0.5)
    layers = (Layer(mixer, Mlp(_WIDTH)),) * 2
    return ModelConfig(layers, _HIDDEN, _VOCAB, 1e-5, True, 4096, (0,), None, "float32")  # noqa: FBT003 - tied


def weights(make: Make) -> Iterator[tuple[str, StoredWeight]]:
    """Yields the layers' weights: some rows, over and over."""
    rng = np.random.default_rng(0)
    for name, (outputs, inputs) in {**projections(two_layers()), "model.embed_tokens": (_VOCAB, _HIDDEN)}.items():
        some = make((rng.standard_normal((_ROWS, inputs)) / inputs**0.5).astype(np.float32))
        repeated_rows = replace(some, shape=(outputs, inputs), read=partial(_rows, some, outputs))
        yield f"{name}.weight", repeated_rows
    of_layers = [f"layers.{n}.{norm}_layernorm" for n in range(2) for norm in ("input", "post_attention")]
    for name in (*of_layers, "norm"):
        yield f"model.{name}.weight", StoredWeight.of(np.ones(_HIDDEN, np.float32), Kind.F32)


def _rows(some: StoredWeight, count: int) -> Bytes:
    return np.resize(some.read(), (count, some.read().shape[1]))


def fastest(run: Callable[[], object], times: int) -> float:
    """Returns the CPU time of the fastest of `times` calls."""
    spent = []
    for _ in range(times):
        began = time.process_time()
        run()
        spent.append(time.process_time() - began)
    return min(spent)


def show(kernels: str, name: str, times: int, possible: float) -> None:
    """Prints the figures of a type. `possible`: multiplications a second."""
    program = NativeProgram(two_layers(), weights(TYPES[name][1]), 32)
    found = loaded(library(cache_dir(), Machine.this(), kernels, print))
    executor = ModelExecutor(NativeForward(found, program, threads=1))
    steps, size = Steps(executor, max(DECODES), PREFILL, _VOCAB), program.weight_bytes
    matrices = sum(outputs * inputs for outputs, inputs in projections(program.config).values()) + _VOCAB * _HIDDEN
    limit, told = fastest(torch.ones(size // 4).sum, times), [f"{name:7}{8 * size / matrices:6.2f} bits"]
    for rows in DECODES:
        spent = fastest(partial(steps.run, rows, 0, 1), times)
        told.append(f"{rows:2} row{'s' if rows > 1 else ' '} {1e3 * spent:5.1f} ms, {spent / limit:5.2f}")
    made = prefill_multiplications(program.config, PREFILL) / fastest(partial(steps.run, 1, 0, PREFILL), times)
    told.append(f"{PREFILL} tokens {made / 1e9:4.0f} billion multiplications/s, {made / possible:.2f}")
    print(";  ".join(told), flush=True)
    executor.close()


def main() -> None:
    """Prints the table for the chosen kernels."""
    parser = argparse.ArgumentParser(prog="python -m bench.weight_types", description=__doc__)
    parser.add_argument("kernels", nargs="*", help="by default the best that this machine can run")
    parser.add_argument("--types", default=",".join(TYPES), help="by default all")
    parser.add_argument("--times", type=int, default=10, help="number of measurements for each figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for kernels in arguments.kernels or Machine.this().variants()[:1]:
        possible = multiplications(kernels, 1)
        print(
            f"\n{kernels}, one thread: CPU time of a decode, and how many times the limit it is; "
            f"rate of a prefill, and its part of {possible / 1e9:.0f} billion multiplications/s"
        )
        for name in arguments.types.split(","):
            show(kernels, name, arguments.times, possible)


if __name__ == "__main__":
    main()
