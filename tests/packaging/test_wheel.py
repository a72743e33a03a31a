"""A wheel with kernels serves machines without a compiler, users without a home, and packages that cannot be
written."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tenuto.base.config import cache_dir
from tenuto.kernels.native.build import Machine

ROOT = Path(__file__).parents[2]
HERE = Machine.this()


def _unprivileged() -> list[str]:
    """Returns what runs a command as a user without a name, where the system allows that; else nothing."""
    command = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]
    allowed = shutil.which(command[0]) and subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if allowed and allowed.returncode == 0 else []


@pytest.mark.skipif(not (HERE.compiler and HERE.variants()), reason="no compiler, or no variant for this CPU")
def test_from_a_wheel_and_without_a_compiler_the_packages_kernels_answer(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    variant = HERE.variants()[-1]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "TENUTO_PREBUILT": variant},
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-any" not in wheel.name
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
