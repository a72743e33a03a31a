"""Structures and numbers declared in both Python and C++ are equal."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from tenuto.kernels.elements import Element, KVCacheDtype
from tenuto.kernels.native import library
from tenuto.kernels.native.build import SOURCES, VARIANTS, Machine
from tenuto.kernels.native.formats import FORMATS, PanelFormat
from tenuto.kernels.native.pack import BLOCK, LANES
from tenuto.models.config import ACTIVATIONS

HERE = Machine.this()
STRUCTURES = {
    "Matrix": library.Matrix,
    "SamplingOptions": library.SamplingOptions,
    "TenutoRope": library.Rope,
    "TenutoGroup": library.Group,
    "TenutoAttention": library.Attention,
    "TenutoRecurrent": library.Recurrent,
    "TenutoExperts": library.Experts,
    "TenutoOp": library.Op,
    "TenutoModel": library.Model,
    "TenutoGroupStep": library.GroupStep,
    "TenutoLowRank": library.LowRank,
    "TenutoAdapter": library.Adapter,
    "TenutoStep": library.Step,
    "TenutoDraws": library.Draws,
}
KV_TYPES = {"BF16": KVCacheDtype.AUTO, "INT8": KVCacheDtype.INT8}
HEAD_DIMS = (16, 32, 48, 64, 80, 128, 256)

needs_compiler = pytest.mark.skipif(
    HERE.compiler is None or "avx2" not in HERE.variants(), reason="no compiler, or no AVX2"
)


def layout(name: str, structure: type[ctypes.Structure]) -> list[str]:
    """Returns conditions that hold if the C++ structure `name` has exactly the fields of `structure`."""
    conditions = [f"sizeof({name}) == {ctypes.sizeof(structure)}"]
    for field, *_ in structure._fields_:
        own = getattr(structure, field)
        conditions += [
            f"offsetof({name}, {field}) == {own.offset}",
            f"sizeof((({name} *)nullptr)->{field}) == {own.size}",
        ]
    return conditions


def panel_format(member: PanelFormat) -> list[str]:
    """Returns conditions that hold if the struct of a format has its number and sizes."""
    conditions = [f"(int)PanelFormat::{member.name} == {member.value}"]
    if member.quant_bytes:
        conditions.append(f"{member.name}::BLOCK_BYTES == {member.quant_bytes * LANES}")
    return conditions


def compiled(tmp_path: Path, conditions: list[str]) -> subprocess.CompletedProcess[str]:
    """Compiles a check of all conditions."""
    source = tmp_path / "layouts.cpp"
    checks = "\n".join(f"static_assert({condition});" for condition in conditions)
    source.write_text(f'#include <cstddef>\n#include "interface.h"\n{checks}\n')
    flags = [f"-m{feature}" for feature in VARIANTS["avx2"]]
    command = [str(HERE.compiler), "-std=c++17", "-fsyntax-only", "-w", *flags, f"-I{SOURCES}", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_compiler
def test_structures_and_numbers_are_the_same_in_python_and_cpp(tmp_path: Path) -> None:
    conditions = [f"LANES == {LANES}", f"BLOCK == {BLOCK}"]
    for name, structure in STRUCTURES.items():
        conditions += layout(name, structure)
    conditions += [f"(int){kind.name} == {kind.value}" for kind in library.OpKind]
    conditions += [f"(int){name.upper()} == {number}" for number, name in enumerate(ACTIVATIONS)]
    conditions += [f"(int)KvType::{name} == {dtype.number}" for name, dtype in KV_TYPES.items()]
    for member in PanelFormat:
        conditions += panel_format(member)
    made = {conversion.format for conversion in FORMATS.values()} | {
        PanelFormat.INT4,
        PanelFormat.INT8,
        PanelFormat.FP8,
    }
    assert made == {f for f in PanelFormat if f.quant_bytes}
    assert set(KV_TYPES.values()) == set(KVCacheDtype)
    assert set(STRUCTURES.values()) == {
        value for value in vars(library).values() if isinstance(value, type) and issubclass(value, ctypes.Structure)
    }
    done = compiled(tmp_path, conditions)
    assert done.returncode == 0, done.stderr
    assert compiled(tmp_path, ["offsetof(TenutoOp, consumer) == 0"]).returncode != 0


PROBE = """
#include "kv_cache.h"
extern "C" int64_t block_bytes(int type, int head_dim) {
  Cache cache;
  cache.type = (KvType)type, cache.head_dim = head_dim;
  return cache.block_bytes();
}
"""


@needs_compiler
def test_slots_of_a_page_have_the_size_that_the_kernels_use(tmp_path: Path) -> None:
    source, made = tmp_path / "probe.cpp", tmp_path / "probe.so"
    source.write_text(PROBE)
    flags = [f"-m{feature}" for feature in VARIANTS["avx2"]]
    command = [str(HERE.compiler), "-std=c++17", "-w", "-fPIC", "-shared", *flags, f"-I{SOURCES}"]
    subprocess.run([*command, "-o", str(made), str(source)], check=True)
    block_bytes = ctypes.CDLL(str(made)).block_bytes
    block_bytes.restype = ctypes.c_int64
    for dtype in KVCacheDtype:
        for head_dim in HEAD_DIMS:
            assert LANES * dtype.slot_bytes(head_dim, Element.BFLOAT16) == block_bytes(dtype.number, head_dim)
