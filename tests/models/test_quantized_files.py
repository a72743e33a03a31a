"""Models that GPTQ, AWQ, compressed-tensors or transformers quantized: weights keep their bits, and every variant of
the native kernels computes with what the tools' own decoding gives."""

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from tenuto.base.config import cache_dir
from tenuto.base.errors import ModelError
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.torch_forward import TorchForward
from tenuto.models.decoder import Decoder
from tenuto.models.hf import HfCheckpoint
from tenuto.models.store import resolve
from tests.exec.kernels import every_variant
from tests.exec.mixed_driver import MixedDriver
from tests.exec.rounding import RoundedForward, assert_rounded_as_said, relative_error, round_products
from tests.models.quantized_files import (
    Made,
    Quantization,
    awq,
    fine_grained,
    fp8,
    gptq,
    packed_words,
    quantize_directory,
    whole_bytes,
)
from tests.models.test_family_files import packed
from tests.models.tiny import save_hf, tiny_llama
from tests.models.tiny_hybrids import tiny_gpt_oss

WIDTH = 384


def shuffled(group: int) -> torch.Tensor:
    """Returns an order of `WIDTH` inputs, int64, in groups whose inputs ascend."""
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(2))
    return order.view(-1, group).sort(dim=1).values.flatten()


METHODS: dict[str, tuple[Quantization, float]] = {
    "gptq int4": (gptq(4, 64, symmetric=True), 4.25),
    "gptq int4 with zeros": (gptq(4, 128, symmetric=False), 4.5),
    "gptq int4, format 2": (gptq(4, 32, symmetric=False, version="gptq_v2"), 6),
    "gptq int8 of outputs": (gptq(8, -1, symmetric=True), 8.125),
    "gptq int4, desc_act": (gptq(4, 64, symmetric=True, order=shuffled(64)), 4.35),
    "gptq int8 with zeros, desc_act": (gptq(8, 128, symmetric=False, order=shuffled(128)), 8.6),
    "awq": (awq(64), 5),
    "compressed int4": (packed_words(4, 128, symmetric=True), 4.5),
    "compressed int4 with zeros": (packed_words(4, 32, symmetric=False, dtype=torch.float16), 6),
    "compressed int4, actorder": (packed_words(4, 128, symmetric=True, order=shuffled(128)), 4.6),
    "compressed int4, groups of 96": (packed_words(4, 96, symmetric=True), 6),
    "compressed int8 in words": (packed_words(8, 128, symmetric=True), 8.5),
    "compressed int8 of outputs": (whole_bytes("channel"), 8.5),
    "compressed int8 with zeros": (whole_bytes("channel", symmetric=False), 8.5),
    "compressed int8 of the whole": (whole_bytes("tensor"), 8.5),
    "compressed fp8 of outputs": (fp8("channel", torch.bfloat16), 8.25),
    "compressed fp8 of the whole": (fp8("tensor"), 8.25),
    "compressed fp8 of squares": (fp8("block"), 8.5),
    "fine-grained fp8": (fine_grained(), 8.5),
}
"""Each with the most bits that a weight may take in memory."""
DECODED_BY_TRANSFORMERS = [
    method for method in METHODS if method.startswith(("compressed", "fine")) and "actorder" not in method
]
"""New versions of compressed-tensors do not read the files with `actorder` that earlier ones wrote."""
LLAMA: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}


def logits_of_short_texts(executor: ModelExecutor) -> torch.Tensor:
    """Returns logits after each token of 14 texts of 5 tokens, side by side: float32 [70, vocab]."""
    texts = dict(enumerate(np.random.default_rng(1).integers(3, 100, (14, 5)).tolist()))
    found = MixedDriver(executor, rows=14).logits(texts).clone()
    executor.close()
    return found


def compare(
    path: Path, variant: str, kind: Kind, monkeypatch: pytest.MonkeyPatch, order: torch.Tensor | None = None
) -> int:
    """Compares a variant with PyTorch from the same files, where `kind` is a type that inputs are rounded alike for, in
    this `order`. Returns the size of the weights in memory."""
    executor = load_executor(resolve(str(path), path), ExecutorOptions(16, kernels=variant, cache=cache_dir()))
    assert isinstance(executor.forward, NativeForward)
    size = executor.forward.weight_bytes
    checkpoint = HfCheckpoint(path)
    decoder = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    exact = logits_of_short_texts(ModelExecutor(TorchForward(decoder, 16)))
    round_products(monkeypatch, variant, kind, order)
    rounded = logits_of_short_texts(ModelExecutor(RoundedForward(decoder, 16)))
    assert_rounded_as_said(logits_of_short_texts(executor), rounded, exact, variant, kind)
    return size


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_those_of_the_tools_own_decoding(method: str, tmp_path: Path) -> None:
    save_hf(tmp_path, tiny_llama(**LLAMA).bfloat16())
    expected = quantize_directory(tmp_path, METHODS[method][0])
    found = {name: weight.decode() for name, weight in HfCheckpoint(tmp_path).weights()}
    assert len(expected) == 15
    for name, weight in expected.items():
        assert np.array_equal(found[name], weight.numpy()), name


@pytest.mark.filterwarnings("ignore:You passed .quantization_config.:UserWarning")
@pytest.mark.parametrize("method", DECODED_BY_TRANSFORMERS)
def test_weights_are_those_that_transformers_decodes(method: str, tmp_path: Path) -> None:
    """To within the type of the scales, in which compressed-tensors decodes."""
    config: Any = FineGrainedFP8Config(dequantize=True, weight_block_size=(64, 64))
    if method.startswith("compressed"):
        pytest.importorskip("compressed_tensors")
        config = CompressedTensorsConfig(run_compressed=False)
    save_hf(tmp_path, tiny_llama(**LLAMA).bfloat16())
    quantize_directory(tmp_path, METHODS[method][0])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=config)
    expected = model.state_dict()
    found = {name: weight.decode() for name, weight in HfCheckpoint(tmp_path).weights()}
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert np.abs(found[name] - weight.float().numpy()).max() <= 2**-8 * np.abs(found[name]).max(), name


@every_variant
@pytest.mark.parametrize("method", METHODS)
def test_quantized_files_are_computed_in_their_bits(
    variant: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (quantization, bits) = tiny_llama(**LLAMA).bfloat16(), METHODS[method]
    save_hf(tmp_path, model)
    quantize_directory(tmp_path, quantization)
    floats = Kind.BF16 if variant in ("amx", "avx512_bf16", "neon_bf16") else Kind.F16
    size = compare(tmp_path, variant, floats if "fp8" in method else Kind.Q8_0, monkeypatch, quantization.order)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    others = 2 * 128 * WIDTH + 4 * 5 * WIDTH + 64 * 50  # embedding, norms, ends of lines
    assert size <= matrices * bits / 8 + others


@every_variant
def test_matrices_that_share_an_input_but_not_its_order_are_decoded(variant: str, tmp_path: Path) -> None:
    orders = cycle([shuffled(64), shuffled(64).roll(64), shuffled(64).roll(128)])

    def make(weight: torch.Tensor) -> Made:
        return gptq(8, 64, symmetric=True, order=next(orders)).make(weight)

    save_hf(tmp_path, tiny_llama(**LLAMA).bfloat16())
    quantize_directory(tmp_path, Quantization(METHODS["gptq int8 with zeros, desc_act"][0].config, make))
    executor = load_executor(resolve(str(tmp_path), tmp_path), ExecutorOptions(16, kernels=variant, cache=cache_dir()))
    assert isinstance(executor.forward, NativeForward)
    assert executor.forward.weight_bytes > 4 * 2 * 2 * WIDTH * WIDTH  # `gate_proj` and `up_proj` of two layers
    checkpoint = HfCheckpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    exact = logits_of_short_texts(ModelExecutor(TorchForward(decoder, 16)))
    assert relative_error(logits_of_short_texts(executor), exact) < 0.05


def save_gpt_oss_in_four_bits(directory: Path, size: int) -> tuple[int, int]:
    """Writes a model of this hidden size, with experts in MXFP4. Returns the numbers of weights of experts and of
    others."""
    model = tiny_gpt_oss(hidden_size=size, intermediate_size=size, num_hidden_layers=2, initializer_range=0.05)
    model.bfloat16().save_pretrained(directory)
    file, generator, count = directory / "model.safetensors", torch.Generator().manual_seed(4), 0
    stored = {}
    for name, tensor in load_file(file).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            stored[f"{name}_blocks"], scales = packed(tensor.mT, generator)
            stored[f"{name}_scales"] = scales - 6
            count += tensor.numel()
        else:
            stored[name] = tensor.float()
    save_file(stored, file, {"format": "pt"})
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    return count, sum(tensor.numel() for tensor in stored.values() if tensor.is_floating_point())


@every_variant
def test_experts_of_gpt_oss_are_computed_in_four_bits(variant: str, tmp_path: Path) -> None:
    count, others = save_gpt_oss_in_four_bits(tmp_path, 256)
    executor = load_executor(resolve(str(tmp_path), tmp_path), ExecutorOptions(16, kernels=variant, cache=cache_dir()))
    assert isinstance(executor.forward, NativeForward)
    assert executor.forward.weight_bytes <= count * 4.25 / 8 + 1.2 * 4 * others
    checkpoint = HfCheckpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    exact = logits_of_short_texts(ModelExecutor(TorchForward(decoder, 16)))
    found = logits_of_short_texts(executor)
    assert (found - exact).abs().mean() < 0.03 * exact.abs().mean()


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (gptq(4, 64, symmetric=True), {"bits": 3}, "bits = 3 in its quantization_config; supported: 4, 8"),
        (gptq(4, 64, symmetric=True), {"checkpoint_format": "marlin"}, "'marlin' .* supported: gptq, gptq_v2"),
        (awq(64), {"version": "gemv"}, "version = 'gemv' .* supported: gemm"),
        (
            whole_bytes("channel"),
            {"format": "nvfp4-pack-quantized"},
            "format = 'nvfp4-.* supported: pack-quantized, int",
        ),
        (whole_bytes("channel"), {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-.* supported: dense"),
        (fine_grained(), {"weight_block_size": [0, 64]}, "weight_block_size .* allowed: two whole numbers"),
        (
            fine_grained(),
            {"quant_method": "hqq"},
            "method 'hqq', .* supported: none, gptq, awq, compressed-tensors, fp8",
        ),
    ],
)
def test_unsupported_quantizations_are_refused_by_name(
    method: Quantization, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_hf(tmp_path, tiny_llama(**LLAMA | {"num_hidden_layers": 1}))
    quantize_directory(tmp_path, Quantization(method.config | changes, method.make))
    with pytest.raises(ModelError, match=message):
        HfCheckpoint(tmp_path)


def changed(quantization: Quantization, part: str, change: Any) -> Quantization:
    """Returns a quantization whose part of this name is changed; left out if `change` returns None."""

    def make(weight: torch.Tensor) -> Any:
        parts, expected = quantization.make(weight)
        other = change(parts.pop(part))
        return parts if other is None else parts | {part: other}, expected

    return Quantization(quantization.config, make)


NOT_A_NUMBER = torch.tensor(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (changed(gptq(4, 64, symmetric=True), "g_idx", lambda part: part.clamp(max=4)), "expected: each of 0 to 5 64"),
        (changed(gptq(4, 64, symmetric=True), "g_idx", lambda part: part[1:]), r"g_idx is of shape \[383\]; expected"),
        (changed(gptq(4, 64, symmetric=True), "g_idx", lambda part: part.half()), "g_idx is of type F16; supported: I"),
        (changed(gptq(4, 64, symmetric=True), "qzeros", lambda part: None), r"lack .*\.qzeros, a part of a quantized"),
        (changed(gptq(4, 64, symmetric=True), "scales", lambda part: part[:, 1:]), r"scales is of shape .*; expected"),
        (changed(awq(64), "qweight", lambda part: part.short()), r"qweight is of type I16; supported: I32"),
        (changed(awq(64), "qzeros", lambda part: part[1:]), r"qzeros is of shape .*; expected: \["),
        (packed_words(4, 16, symmetric=True), "24 scales for 384 inputs; supported: one for a multiple of 32"),
        (
            changed(packed_words(4, 64, symmetric=True), "weight_shape", lambda part: part // 2),
            r"weight_packed is of shape .*; expected: \[",
        ),
        (changed(fp8("block"), "weight_scale", lambda part: part[:, 1:]), "but its scales of"),
        (changed(fp8("channel"), "weight", lambda part: NOT_A_NUMBER.expand(part.shape)), "not numbers"),
    ],
)
def test_damaged_parts_are_refused_by_name(quantization: Quantization, message: str, tmp_path: Path) -> None:
    save_hf(tmp_path, tiny_llama(**LLAMA | {"num_hidden_layers": 1}))
    quantize_directory(tmp_path, quantization)
    with pytest.raises(ModelError, match=message):
        [weight.read() for _, weight in HfCheckpoint(tmp_path).weights()]
