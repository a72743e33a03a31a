"""The kernels for Arm compute what those for x86 compute: whole models in an emulated process.

`neon` and `neon_dot` round as `avx2` does, and `neon_bf16` as `avx512_bf16` does. They differ by the order of additions
alone, so most tokens agree to within float32; a few have a value that goes to another quant.
"""

import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from tenuto.exec import load
from tenuto.kernels.native.formats import FORMATS, PanelFormat
from tests.exec.kernels import HERE
from tests.exec.rounding import FLIPPED, relative_error
from tests.exec.test_native_forward import WIDE, logits_of_short_texts, native
from tests.kernels.arm.emulator import ARM, NEON, Emulated, needs_emulator
from tests.models.quantized_files import OF_DIRECTORIES, quantize_directory
from tests.models.test_quantized_files import LLAMA
from tests.models.tiny import save_gguf, save_hf, tiny_llama

SAME_ROUNDING = {"neon_bf16": "avx512_bf16", "neon_dot": "avx2", "neon": "avx2"}
KINDS = [*FORMATS, Kind.F16, Kind.BF16, Kind.F32]

emulated = cache(Emulated)


@needs_emulator
@pytest.mark.parametrize("variant", NEON)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_weight_format_gives_the_logits_of_x86(
    kind: Kind, kv_cache_dtype: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SAME_ROUNDING[variant]
    if other not in HERE.variants():
        pytest.skip(f"{other} cannot run here")
    path = save_gguf(tmp_path / "m.gguf", WIDE, kind)
    compare(path, variant, other, monkeypatch, kv_cache_dtype=kv_cache_dtype)


@needs_emulator
@pytest.mark.parametrize("variant", NEON)
@pytest.mark.parametrize("stored", OF_DIRECTORIES, ids=lambda stored: stored.name)
def test_formats_of_safetensors_files_give_the_logits_of_x86(
    stored: PanelFormat, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SAME_ROUNDING[variant]
    if other not in HERE.variants():
        pytest.skip(f"{other} cannot run here")
    save_hf(tmp_path, tiny_llama(**LLAMA))
    quantize_directory(tmp_path, OF_DIRECTORIES[stored])
    compare(tmp_path, variant, other, monkeypatch)


def compare(path: Path, variant: str, other: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    theirs = logits_of_short_texts(native(path, other, **options))
    monkeypatch.setattr(load, "loaded", emulated)
    ours = logits_of_short_texts(native(path, variant, machine=ARM, **options))
    differ = [relative_error(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    assert statistics.median(differ) < FLIPPED, differ
