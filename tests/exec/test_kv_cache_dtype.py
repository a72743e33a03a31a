"""Keys and values in bytes: native kernels compute what PyTorch computes from keys and values rounded the same way.

The remaining error is measured relative to that of the rounding: queries and softmax weights of 15 and 14 bits, queries
of bfloat16 where there are instructions for it, and numbers so near the middle between two quants that they are rounded
the other way. Weights are float32.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from tenuto.base.config import WorkerSettings, cache_dir
from tenuto.base.errors import ConfigError
from tenuto.base.groups import Kind as GroupKind
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.native.build import Machine
from tenuto.models.config import Attention, Layer, ModelConfig
from tenuto.models.decoder import Decoder
from tenuto.models.hf import HfCheckpoint
from tenuto.models.native.key_scales import key_scales
from tenuto.models.native.panels import Panels
from tenuto.models.rope import Rope, linear_divisors
from tenuto.models.store import resolve
from tenuto.models.weights import StoredWeight
from tenuto.runtime.models import load_model
from tests.exec.kernels import FLOAT32, HERE, every_variant, needs_variant
from tests.exec.mixed_driver import MixedDriver
from tests.exec.rounding import RoundedForward, relative_error
from tests.models.tiny import tiny_llama
from tests.models.tiny_dense import tiny_gemma2, tiny_qwen2
from tests.models.tiny_hybrids import tiny_bamba, tiny_gpt_oss

LENGTH, PAGE = 300, 4
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "heads of 16": partial(tiny_llama, max_position_embeddings=1024),
    "heads of 64": partial(tiny_llama, head_dim=64),
    "heads of 80": partial(tiny_llama, head_dim=80),
    "heads of 128, one key head for 8": partial(
        tiny_llama, head_dim=128, num_attention_heads=8, num_key_value_heads=1, num_hidden_layers=2
    ),
    "windows and caps": tiny_gemma2,
    "windows and sinks": tiny_gpt_oss,
    "recurrent layers": tiny_bamba,
}
PART = 32
"""The number of dimensions of a key that share a scale."""


def made_of(*mixers: Attention) -> ModelConfig:
    layers = tuple(Layer(mixer, None) for mixer in mixers)
    return ModelConfig(layers, 32, 8, 1e-5, tied=True, max_context=64, eos=(), bos=None, dtype="float32")


def in_bytes(values: torch.Tensor, part: int) -> torch.Tensor:
    """Rounds float32 [..., dimensions] to bytes, where every `part` of them has a bfloat16 scale, its highest / 127
    rounded up."""
    found = []
    for each in values.split(part, dim=-1):
        highest = each.abs().amax(dim=-1, keepdim=True) / 127
        scale = ((highest.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
        found.append((each * (1 / scale)).round() * scale)
    return torch.cat(found, dim=-1)


@pytest.fixture(scope="module", params=list(MODELS.values()), ids=list(MODELS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    request.param().float().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def text() -> list[int]:
    return np.random.default_rng(1).integers(3, 60, LENGTH).tolist()


@pytest.fixture(scope="module")
def exact(path: Path, text: list[int]) -> list[torch.Tensor]:
    """Logits after each token, float32 [LENGTH, vocab]: with rounded keys and values, and with float32."""
    checkpoint = HfCheckpoint(path)
    decoder = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    found = []
    in_parts = RoundedForward(decoder, PAGE, partial(in_bytes, part=PART), lambda v: in_bytes(v, v.shape[-1]))
    for forward in (in_parts, TorchForward(decoder, PAGE)):
        executor = ModelExecutor(forward)
        found.append(MixedDriver(executor, rows=1, units=100).logits({0: text}).clone())
        executor.close()
    return found


def native(path: Path, variant: str = "auto", kv_cache_dtype: str = "int8", **options: Any) -> ModelExecutor:
    files = resolve(str(path), path)
    return load_executor(
        files, ExecutorOptions(PAGE, kernels=variant, kv_cache_dtype=kv_cache_dtype, **{"cache": cache_dir()} | options)
    )


@every_variant
def test_logits_equal_those_of_pytorch_with_keys_and_values_rounded_the_same_way(
    path: Path, text: list[int], exact: list[torch.Tensor], variant: str
) -> None:
    """In memory full of garbage, and the same bit for bit wherever the text is cut; with tiles, which have keys and
    values in bfloat16, only if all pieces have many tokens."""
    executor = native(path, variant)
    rounded, unrounded = exact

    def error_left(logits: torch.Tensor) -> float:
        return relative_error(logits, rounded) / relative_error(rounded, unrounded)

    def in_pieces(ends: list[int]) -> torch.Tensor:
        driver = MixedDriver(executor, rows=1, units=100)
        return torch.cat([driver.logits({0: text[a:b]}).clone() for a, b in zip([0, *ends], ends, strict=False)])

    whole, cut = in_pieces([LENGTH]), in_pieces([1, 3, 10, 11, 65, 200, 201, LENGTH])
    assert max(error_left(whole), error_left(cut)) < (0.3 if variant in FLOAT32 else 0.7)
    assert torch.equal(in_pieces([40, 110, 200, LENGTH]), whole)
    assert torch.equal(cut, whole) or variant == "amx"
    executor.close()


@pytest.fixture(scope="module")
def with_outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 whose biases make keys far larger in two dimensions of each head, and its queries smaller there."""
    model, directory = tiny_qwen2(max_position_embeddings=1024), tmp_path_factory.mktemp("outliers")
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data
        bias.zero_()
        bias[5::16], bias[11::16] = 60.0, -25.0
        queries = layer.self_attn.q_proj
        for dimension in (3, 5, 11, 13):  # 3 and 11 are rotated together, 5 and 13 too
            queries.weight.data[dimension::16] /= 20
            queries.bias.data[dimension::16] /= 20
    model.float().save_pretrained(directory)
    return directory


@every_variant
def test_dimensions_with_far_larger_keys_do_not_cost_the_others_their_precision(
    with_outliers: Path, text: list[int], variant: str
) -> None:
    checkpoint = HfCheckpoint(with_outliers)
    decoder = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    in_parts = RoundedForward(decoder, PAGE, partial(in_bytes, part=PART), lambda v: in_bytes(v, v.shape[-1]))
    found = []
    for executor in (native(with_outliers, variant), ModelExecutor(in_parts), ModelExecutor(TorchForward(decoder, 4))):
        found.append(MixedDriver(executor, rows=1, units=100).logits({0: text}).clone())
        executor.close()
    scaled, unscaled, exact = found
    assert relative_error(scaled, exact) < 0.5 * relative_error(unscaled, exact)


def test_key_scales_follow_from_the_size_of_their_weights() -> None:
    shape = Attention(1, 1, 64, Rope(1e4, linear_divisors(64, 1.0)), 0.125, qk_norm=True)
    config = made_of(shape, shape, replace(shape, qk_norm=False))
    norms = torch.ones(2, 64).numpy()
    norms[0, 3], norms[0, 40], norms[1, 7] = 20.0, 9.0, 70.0
    weights = [
        (f"model.layers.{i}.self_attn.{name}.weight", StoredWeight.of(value, Kind.F32))
        for i in range(3)
        for name, value in (("k_norm", norms[i % 2]), ("k_proj", np.ones((64, 32), np.float32)))
    ]
    keys = key_scales(config, Panels(weights, plain=False))
    assert {i: float(scale) for i, scale in enumerate(keys.scales[0]) if scale != 1} == {
        3: 1 / 16, 35: 1 / 16,  # rotated together
        8: 1 / 8, 40: 1 / 8,
    }  # fmt: skip
    assert (set(keys.scales), set(keys.wide)) == ({0}, {1})
    assert key_scales(config, Panels(weights, plain=False)).digest == keys.digest
    norms[0, 40] = 5.0
    others = [
        (name, StoredWeight.of(norms[0], Kind.F32) if name.endswith("0.self_attn.k_norm.weight") else each)
        for name, each in weights
    ]
    assert key_scales(config, Panels(others, plain=False)).digest != keys.digest


@every_variant
def test_layers_whose_keys_exceed_bytes_stay_in_16_bits(tmp_path: Path, text: list[int], variant: str) -> None:
    model = tiny_qwen2(max_position_embeddings=1024)
    count = len(model.model.layers)
    for layer in model.model.layers[1:]:
        layer.self_attn.k_proj.bias.data[5] = 3000.0
    model.float().save_pretrained(tmp_path)
    executor = native(tmp_path, variant)
    assert [group.kind for group in executor.spec.groups] == [GroupKind.FULL] * 2
    assert f"8-bit keys and values, of 16 bits in {count - 1} of {count} layers" in executor.forward.description
    whole = MixedDriver(executor, rows=1, units=100).logits({0: text}).clone()
    driver = MixedDriver(executor, rows=1, units=100)
    cut = torch.cat([driver.logits({0: text[a:b]}).clone() for a, b in ((0, 40), (40, 41), (41, LENGTH))])
    assert torch.equal(cut, whole) or variant == "amx"
    executor.close()
    model.model.layers[0].self_attn.k_proj.bias.data[5] = 3000.0
    model.save_pretrained(tmp_path)
    found = []
    for kept_as in ("int8", "auto"):
        executor = native(tmp_path, variant, kept_as)
        found.append(MixedDriver(executor, rows=1, units=100).logits({0: text}).clone())
        executor.close()
    assert torch.equal(*found)


@every_variant
def test_weights_that_replace_others_scale_keys_as_those_did(tmp_path: Path, text: list[int], variant: str) -> None:
    """So keys that stay in memory, or come back to it, mean what they meant."""
    model = tiny_qwen2(max_position_embeddings=1024)
    for layer in model.model.layers[1:]:  # these layers stay in 16 bits, and are not scaled
        layer.self_attn.k_proj.bias.data[5] = 3000.0
    model.float().save_pretrained(tmp_path / "first")
    model.model.layers[0].self_attn.k_proj.bias.data[5::16] = 60.0
    model.save_pretrained(tmp_path / "second")
    executor, second = (native(tmp_path / name, variant) for name in ("first", "second"))
    assert second.forward.layout != executor.forward.layout
    second.close()
    whole = MixedDriver(executor, rows=1, units=100).logits({0: text}).clone()
    groups, every, layout = range(len(executor.spec.groups)), np.arange(100, dtype=np.int32), executor.forward.layout

    def begun() -> MixedDriver:
        driver = MixedDriver(executor, rows=1, units=100)
        driver.logits({0: text[:200]})
        return driver

    begun()
    kept = [list(executor.read_units(group, every)) for group in groups]
    for name in ("second", "first"):
        executor.restore((), executor.load(str(tmp_path / name)))
        assert executor.forward.layout == layout
    driver = begun()  # in the same units
    for group in groups:
        executor.write_units(group, every, kept[group])
    assert torch.equal(driver.logits({0: text[200:]}), whole[200:]) or variant == "amx"
    executor.close()


@needs_variant
def test_the_size_of_a_page_is_that_of_its_bytes_and_scales(path: Path) -> None:
    executor, wide = native(path), native(path, kv_cache_dtype="auto")
    for number, (group, other) in enumerate(zip(executor.spec.groups, wide.spec.groups, strict=True)):
        if group.kind is GroupKind.STATE:
            assert group == other
            continue
        assert group.bytes_per_unit < 0.76 * other.bytes_per_unit  # 0.53 with heads of 64
        executor.prepare((3,) * len(executor.spec.groups), 1)
        assert isinstance(executor.forward, NativeForward)
        assert executor.forward.memory(number).shape == (3, group.bytes_per_unit)
    assert "8-bit keys and values" in executor.forward.description
    assert executor.layout != wide.layout
    executor.close()
    wide.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"variant": "torch"}, "here: torch, cpu, None; allowed with plain PyTorch: auto"),
        ({"dtype": "float32"}, "here: auto, cpu, float32"),
        ({"machine": Machine(HERE.features, None)}, "no C"),
        ({"kv_cache_dtype": "q8_0"}, "'q8_0'; allowed: auto, int8"),
    ],
)
def test_8_bit_keys_are_refused_on_pytorch_with_the_allowed_values(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype is .*{reason}"):
        native(tmp_path, **({"cache": tmp_path} | options))


def test_the_witness_has_neither_keys_nor_values() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int8'; allowed for the witness"):
        load_model(WorkerSettings(model="witness", kv_cache_dtype="int8"))
