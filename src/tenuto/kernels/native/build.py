"""Compiles the native kernels for this CPU, once, into the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tenuto.base.errors import ConfigError

SOURCES = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-w")
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")
_AVX512_BF16 = (*_AVX512, "avx512bf16")
VARIANTS = {
    "amx": (*_AVX512_BF16, "avx512vbmi", "amx-tile", "amx-int8", "amx-bf16"),
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""The CPU features that each variant of the library needs, by their names in compiler flags; the best variant first."""
_KERNEL_NAMES = {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}
"""Names of features in `/proc/cpuinfo`, where they differ from those in compiler flags by more than `_` for `-`."""


class Unavailable(Exception):
    """Native kernels cannot be used here; the message says why."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The CPU's features, by Linux's names, and the compiler, if any. They determine which kernels can be compiled."""

    features: frozenset[str]
    compiler: str | None

    @classmethod
    def this(cls) -> Machine:
        return cls(_features(), next(filter(None, map(shutil.which, _COMPILERS)), None))

    def variants(self) -> list[str]:
        """Returns the variants that this CPU can run, the best first."""
        return [name for name, needs in VARIANTS.items() if self.features.issuperset(map(_kernel_name, needs))]


def _kernel_name(feature: str) -> str:
    return _KERNEL_NAMES.get(feature, feature.replace("-", "_"))


def _features() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def library(cache: Path, machine: Machine, variant: str, say: Callable[[str], None]) -> Path:
    """Returns the path of the compiled kernels of `variant`, and compiles them unless the cache has them for the same
    sources and flags. Two processes at once compile them once. `say` is called with a message before a compilation.

    Raises `ConfigError` if this CPU cannot run `variant`, and `Unavailable` if there is no compiler, or if it fails.
    """
    possible = machine.variants()
    if variant not in possible:
        raise ConfigError(f"kernels are {variant!r}; allowed on this CPU: {', '.join(['auto', *possible, 'torch'])}")
    flags = [*_FLAGS, f'-DTENUTO_VARIANT="{variant}"', *(f"-m{feature}" for feature in VARIANTS[variant])]
    if "avx512f" in VARIANTS[variant]:
        flags.append("-mprefer-vector-width=512")
    path = cache / "kernels" / f"{variant}-{_key(flags)}.so"
    try:
        if path.exists():
            return path
    except OSError as error:
        raise Unavailable(f"{path.parent} cannot be read: {error}") from error
    if machine.compiler is None:
        raise Unavailable(f"there is no C++ compiler ({', '.join(_COMPILERS)})")
    _make(path, machine.compiler, flags, say)
    return path


def _key(flags: Sequence[str]) -> str:
    digest = hashlib.sha256(repr(flags).encode())
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def _make(path: Path, compiler: str, flags: Sequence[str], say: Callable[[str], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():  # another process has compiled it meanwhile
                return
            say(f"Compiling kernels for this CPU ({path.stem.partition('-')[0]}), once: a few seconds.")
            with tempfile.TemporaryDirectory(dir=path.parent) as directory:
                made = Path(directory) / path.name
                command = [compiler, *flags, "-o", str(made), str(SOURCES / "forward.cpp")]
                done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
                if done.returncode:
                    raise Unavailable(f"{compiler} failed: {_last_lines(done.stderr)}")
                made.replace(path)
    except OSError as error:
        raise Unavailable(f"kernels cannot be compiled into {path.parent}: {error}") from error


def _last_lines(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-3:])
