"""Kernels are compiled once, for the features of the CPU, and errors name the missing part."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tenuto.base.errors import ConfigError
from tenuto.kernels.native import build as native_build
from tenuto.kernels.native.build import Machine, Unavailable, library
from tenuto.kernels.native.library import Library

HERE = Machine.this()
AVX2 = frozenset({"avx2", "fma", "f16c"})

needs_compiler = pytest.mark.skipif(
    HERE.compiler is None or "avx2" not in HERE.variants(), reason="no compiler, or no AVX2"
)


def build(cache: Path) -> tuple[Path, int]:
    said: list[str] = []
    return library(cache, HERE, "avx2", said.append), len(said)


@needs_compiler
def test_two_processes_at_once_compile_once_and_later_ones_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # faster to compile
    monkeypatch.setattr(native_build, "_FLAGS", [flag.replace("-O3", "-O0") for flag in native_build._FLAGS])
    tmp_path = tmp_path / "some tenuto folder, größer"
    with ProcessPoolExecutor(2) as pool:
        results = list(pool.map(build, [tmp_path, tmp_path]))
    assert results[0][0] == results[1][0]
    assert sorted(count for _, count in results) == [0, 1]
    assert build(tmp_path) == (results[0][0], 0)
    assert Library(results[0][0]).variant == "avx2"


def test_the_best_variant_for_the_cpu_comes_first() -> None:
    assert Machine(AVX2, None).variants() == ["avx2"]
    assert Machine(AVX2 | {"avx512f"}, None).variants() == ["avx2"]
    assert Machine(AVX2 | {"avx_vnni"}, None).variants() == ["avx2_vnni", "avx2"]
    skylake = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    assert Machine(skylake, None).variants() == ["avx512", "avx2"]
    ice_lake = skylake | {"avx512_vnni"}
    assert Machine(ice_lake, None).variants() == ["avx512_vnni", "avx512", "avx2"]
    sapphire_rapids = ice_lake | {"avx_vnni", "avx512_bf16", "avx512vbmi", "amx_tile", "amx_int8", "amx_bf16"}
    assert Machine(sapphire_rapids, None).variants() == [
        *("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2")
    ]
    graviton2 = frozenset({"asimd", "asimddp"})
    assert Machine(graviton2, None).variants() == ["neon_dot", "neon"]
    assert Machine(graviton2 | {"i8mm", "bf16"}, None).variants() == ["neon_bf16", "neon_dot", "neon"]


def test_unavailable_kernels_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\)"):
        library(tmp_path, Machine(AVX2, None), "avx2", print)
    with pytest.raises(Unavailable, match="/bin/false failed"):
        library(tmp_path, Machine(AVX2, "/bin/false"), "avx2", print)
    with pytest.raises(ConfigError, match="kernels are 'amx'; allowed on this CPU: auto, avx2, torch"):
        library(tmp_path, Machine(AVX2, None), "amx", print)
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot be compiled into"):
        library(tmp_path / "file", Machine(AVX2, "/bin/false"), "avx2", print)


def test_a_damaged_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"nothing")
    with pytest.raises(Unavailable, match="cannot be loaded"):
        Library(tmp_path / "x.so")
