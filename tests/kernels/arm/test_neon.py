"""The kernels for Arm compute what those for x86 compute: whole models in an emulated process.

A variant differs from its twin by the order of additions alone, so most tokens agree to within float32; a few have a
value that goes to another quant.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tenuto.kernels.elements import KVCacheDtype
from tenuto.kernels.native.formats import PanelFormat
from tenuto.models.checkpoint import open_checkpoint, weights_of
from tenuto.models.native.program import NativeProgram
from tenuto.models.store import resolve
from tests.exec.rounding import FLIPPED, relative_error
from tests.exec.test_native_forward import WIDE, logits_of_short_texts
from tests.kernels.arm.emulator import NEON, needs_emulator
from tests.kernels.arm.twins import emulated, executor, needs_twins, twin, twin_of
from tests.models.quantized_files import Quantization, fp8, gptq, quantize_directory, whole_bytes
from tests.models.test_quantized_files import LLAMA, shuffled
from tests.models.tiny import save_gguf, save_hf, tiny_llama

pytestmark = [needs_emulator, needs_twins]
KINDS = [Kind[panels.name] for panels in PanelFormat if panels.name in Kind.__members__]
"""One type of file for each format of panels. Files of other types become the same panels, on any CPU."""


def gguf(kind: Kind) -> Callable[[Path], Path]:
    """Returns a function that writes a GGUF file into a directory, with matrices of this kind."""
    return lambda directory: save_gguf(directory / "m.gguf", WIDE, kind)


def safetensors(quantization: Quantization) -> Callable[[Path], Path]:
    """Returns a function that writes a quantized model into a directory."""

    def save(directory: Path) -> Path:
        save_hf(directory, tiny_llama(**LLAMA))
        quantize_directory(directory, quantization)
        return directory

    return save


FILES = {kind.name: gguf(kind) for kind in KINDS} | {
    "INT4": safetensors(gptq(4, 128, symmetric=False)),
    "INT4, desc_act": safetensors(gptq(4, 64, symmetric=True, order=shuffled(64))),
    "INT8": safetensors(whole_bytes("channel", symmetric=False)),
    "FP8": safetensors(fp8("block")),
}
MODELS = [(name, KVCacheDtype.AUTO) for name in FILES] + [(name, KVCacheDtype.INT8) for name in ("Q4_0", "BF16", "F32")]
"""Weight formats, each with a type of keys and values. What attention hands on is float32 whatever its keys are, so
8-bit keys come with one format for each kind of input: quants, pairs of bfloat16, and float32."""


@dataclass(frozen=True)
class Stage:
    """A model, and the logits that twins have computed for it."""

    program: NativeProgram
    found: dict[str, torch.Tensor] = field(default_factory=dict)

    def expected(self, variant: str) -> torch.Tensor:
        name = twin_of(variant)
        if name not in self.found:
            self.found[name] = logits_of_short_texts(executor(twin(name), self.program))
        return self.found[name]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    name, kept_as = request.param
    path = FILES[name](tmp_path_factory.mktemp("model"))
    checkpoint = open_checkpoint(resolve(str(path), path))
    config = checkpoint.config
    return Stage(NativeProgram(config, weights_of(checkpoint, config), 16, kv_cache_dtype=kept_as))


@pytest.mark.parametrize("variant", NEON)
def test_every_weight_format_gives_the_logits_of_x86(stage: Stage, variant: str) -> None:
    """One thread computes: in emulation, two would mostly wait for each other."""
    ours, theirs = logits_of_short_texts(executor(emulated(variant), stage.program, 1)), stage.expected(variant)
    differ = [relative_error(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    assert statistics.median(differ) < FLIPPED, differ
