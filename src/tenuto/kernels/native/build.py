"""Compiles the native kernels for this CPU, once, into the user's cache; where that is impossible, finds those that the
package has."""

from __future__ import annotations

import fcntl
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tenuto.base.errors import ConfigError

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "prebuilt"
"""Libraries in the package, in wheels that have any."""
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-w"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX512_VNNI = (*_AVX512, "avx512vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "avx512bf16")
_NEON_DOT = ("simd", "dotprod")
VARIANTS = {
    "amx": (*_AVX512_BF16, "avx512vbmi", "amx-tile", "amx-int8", "amx-bf16"),
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx2_vnni": (*_AVX2, "avxvnni"),
    "avx2": _AVX2,
    "neon_bf16": (*_NEON_DOT, "i8mm", "bf16"),
    "neon_dot": _NEON_DOT,
    "neon": ("simd",),
}
"""The CPU features that each variant of the library needs, by their names in compiler flags; the best variant first."""
_KERNEL_NAMES = {
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "avxvnni": "avx_vnni",
    "simd": "asimd",
    "dotprod": "asimddp",
}
"""Names of features in `/proc/cpuinfo`, where they differ from those in compiler flags by more than `_` for `-`."""
_MACOS_NAMES = {"asimd": "AdvSIMD", "asimddp": "arm.FEAT_DotProd", "i8mm": "arm.FEAT_I8MM", "bf16": "arm.FEAT_BF16"}
"""Names of features in macOS's `hw.optional`, by those of Linux."""


class Unavailable(Exception):
    """Native kernels cannot be used here; the message says why."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The CPU's features, by Linux's names on any system, and the compiler, if any. They determine which kernels can be
    compiled."""

    features: frozenset[str]
    compiler: str | None

    @classmethod
    def this(cls) -> Machine:
        return cls(_features(), next(filter(None, map(shutil.which, _COMPILERS)), None))

    @classmethod
    def building(cls) -> Machine:
        """Returns a machine with this one's compiler and all features that variants for its architecture need."""
        arm = platform.machine() in ("aarch64", "arm64")
        needs = {feature for needed in VARIANTS.values() if ("simd" in needed) == arm for feature in needed}
        return cls(frozenset(map(_kernel_name, needs)), cls.this().compiler)

    def variants(self) -> list[str]:
        """Returns the variants that this CPU can run, the best first."""
        return [name for name, needs in VARIANTS.items() if self.features.issuperset(map(_kernel_name, needs))]


def _kernel_name(feature: str) -> str:
    return _KERNEL_NAMES.get(feature, feature.replace("-", "_"))


def _features() -> frozenset[str]:
    """Returns the features that Linux or macOS names, or none on other systems."""
    if sys.platform == "darwin":
        return frozenset(name for name, theirs in _MACOS_NAMES.items() if _macos_has(theirs))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(listed, []))


def _macos_has(feature: str) -> bool:
    command = ["/usr/sbin/sysctl", "-n", f"hw.optional.{feature}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
    except OSError:
        return False
    return found.stdout.strip() == "1"


def variant_flags(variant: str) -> list[str]:
    """Returns the compiler flags for the features of a variant. For Arm, g++ would order instructions before it
    chooses registers, and then has too few of them: products would execute half as many instructions again."""
    features = VARIANTS[variant]
    if "simd" in features:
        architecture = f"armv8{'.2' if 'dotprod' in features else ''}-a+{'+'.join(features)}"
        return [f"-march={architecture}", "-fno-schedule-insns"]
    wide = ["-mprefer-vector-width=512"] if "avx512f" in features else []
    return [*(f"-m{feature}" for feature in features), *wide]


def library(cache: Path, machine: Machine, variant: str, say: Callable[[str], None]) -> Path:
    """Returns the path of the compiled kernels of `variant`, and compiles them unless the cache has them for the same
    sources and flags. Two processes at once compile them once. If they cannot be compiled, returns those that the
    package has for the same sources and flags. `say` is called with a message before a compilation, and if the
    package's are used.

    Raises `ConfigError` if this CPU cannot run `variant`, and `Unavailable` if kernels cannot be compiled and the
    package lacks them.
    """
    possible = machine.variants()
    if variant not in possible:
        raise ConfigError(f"kernels are {variant!r}; allowed on this CPU: {', '.join(['auto', *possible, 'torch'])}")
    flags = [*_FLAGS, f'-DTENUTO_VARIANT="{variant}"', *variant_flags(variant)]
    path = cache / "kernels" / f"{variant}-{_key(flags)}.so"
    try:
        return _compiled(path, machine, flags, say)
    except Unavailable as reason:
        shipped = PREBUILT / path.name
        if not shipped.exists():
            raise
        say(f"The package's own kernels compute ({variant}): {reason}")
        return shipped


def _compiled(path: Path, machine: Machine, flags: Sequence[str], say: Callable[[str], None]) -> Path:
    """Returns `path`, and compiles kernels into it unless it exists. Raises `Unavailable`."""
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
