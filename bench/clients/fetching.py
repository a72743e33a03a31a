"""Fetches clients from their package indexes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FETCH_SECONDS = 500
RUN_SECONDS = 240


def call(command: list[str], place: Path, env: dict[str, str] | None = None, seconds: int = RUN_SECONDS) -> str:
    """Runs a program and returns its stdout. Raises `RuntimeError` with the end of its output if it fails."""
    done = subprocess.run(  # noqa: S603 - our own commands
        command,
        cwd=place,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode != 0:
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}:\n{said}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Fetched:
    """Packages below a directory, each in its own folder. Packages that are there already are not fetched again."""

    directory: Path

    def npm(self, package: str, *more: str) -> tuple[Path, str]:
        """Fetches the newest releases of a package and `more`. Returns their directory of programs and the first one's
        version."""
        place = self.directory / package.replace("/", "-").strip("@")
        described = place / "node_modules" / package / "package.json"
        if not described.exists():
            place.mkdir(parents=True, exist_ok=True)
            wanted = [f"{each}@latest" for each in (package, *more)]
            call(["npm", "install", "--prefix", str(place), *wanted], place, seconds=FETCH_SECONDS)
        return place / "node_modules" / ".bin", str(json.loads(described.read_text())["version"])

    def python(self, name: str, packages: tuple[str, ...]) -> tuple[Path, str]:
        """Creates an environment with the newest releases of packages. Returns its Python and the first package's
        version."""
        place = self.directory / name
        python = place / "bin" / "python"
        if not (place / "complete").exists():
            call([sys.executable, "-m", "venv", str(place)], Path.cwd())
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
            call([*pip, *packages], place, seconds=FETCH_SECONDS)
            (place / "complete").touch()
        asked = f"from importlib.metadata import version; print(version({packages[0]!r}))"
        return python, call([str(python), "-c", asked], place).strip()
