"""Compiles kernels into wheels, for machines without a compiler.

`TENUTO_PREBUILT` names the variants, separated by commas, or is `all` for those of this machine's architecture. Without
it a wheel has the sources alone, and kernels are compiled where they run.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Prebuilt(BuildHookInterface):
    """Adds the libraries to a wheel, which is then for this system and architecture only."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles the libraries. Raises `Unavailable` or `ConfigError` if one cannot be compiled."""
        wanted = os.environ.get("TENUTO_PREBUILT", "")
        if not wanted or version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        build = import_module("tenuto.kernels.native.build")
        machine, self._made = build.Machine.building(), tempfile.TemporaryDirectory()
        for variant in machine.variants() if wanted == "all" else wanted.split(","):
            made = build.library(Path(self._made.name), machine, variant, print)
            build_data["force_include"][str(made)] = f"tenuto/kernels/native/prebuilt/{made.name}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}

    def finalize(self, *_: Any) -> None:
        """Removes what the wheel now has."""
        if hasattr(self, "_made"):
            self._made.cleanup()
