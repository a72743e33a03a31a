"""A wheel with kernels serves machines without a compiler, users without a home, and packages that cannot be
written."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tenuto.base.config import cache_dir
from tenuto.kernels.native.build import Machine, variant_flags

ROOT = Path(__file__).parents[2]
HERE = Machine.this()
X86 = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2")
NEON = ("neon_bf16", "neon_dot", "neon")


def _unprivileged() -> list[str]:
    """Returns what runs a command as a user without a name, where the system allows that; else nothing."""
    command = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]
    allowed = shutil.which(command[0]) and subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if allowed and allowed.returncode == 0 else []


def _built(directory: Path, prebuilt: str, **environment: str) -> Path:
    """Returns a wheel that is built into a directory without another."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "TENUTO_PREBUILT": prebuilt, **environment},
    )
    (wheel,) = directory.glob("*.whl")
    assert "-py3-none-any" not in wheel.name
    return wheel


def test_a_wheel_with_all_kernels_has_every_variant_for_its_architecture(tmp_path: Path) -> None:
    """By a compiler that writes its options instead of a library, in no time."""
    pytest.importorskip("hatchling")
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor each; do [ "$last" = -o ] && echo "$@" > "$each"; last=$each; done\n')
    compiler.chmod(0o755)
    wheel = zipfile.ZipFile(_built(tmp_path, "all", PATH=f"{tmp_path}:{os.environ['PATH']}"))
    libraries = [name for name in wheel.namelist() if name.startswith("tenuto/kernels/native/prebuilt/")]
    made = {name.rpartition("/")[2].partition("-")[0]: wheel.read(name).decode() for name in libraries}
    assert sorted(made) == sorted(NEON if platform.machine() in ("aarch64", "arm64") else X86)
    assert len(made) == len(libraries)
    assert all(flag in options.split() for variant, options in made.items() for flag in variant_flags(variant))


@pytest.mark.skipif(not (HERE.compiler and HERE.variants()), reason="no compiler, or no variant for this CPU")
def test_from_a_wheel_and_without_a_compiler_the_packages_kernels_answer(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    variant = HERE.variants()[-1]
    wheel = _built(tmp_path, variant)
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    made = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    packages = Path(made.stdout.strip())
    zipfile.ZipFile(wheel).extractall(packages)
    # Dependencies are those of this environment, but not its Tenuto: paths in a .pth file have no .pth files of theirs.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HOME")}
    for path in packages.rglob("*"):
        path.chmod(path.stat().st_mode & ~0o222)
    done = subprocess.run(
        [*_unprivileged(), python, str(ROOT / "tests" / "packaging" / "without_compiler.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment, "TENUTO_CACHE": str(cache_dir())},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answered, _, answer = done.stdout.partition(" ")
    assert answered == variant
    assert "Paris" in answer
    assert f"The package's own kernels compute ({variant}): there is no C++ compiler" in done.stderr
