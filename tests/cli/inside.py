"""The command line in this process: most commands take less time than a new Python. `test_cli` starts processes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tenuto.cli import main


def run_inside(
    *arguments: str, stdin: str = "", env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `tenuto` with the arguments, 80 columns wide. `env`: the variables that begin with TENUTO_, instead of those
    set here."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    command = ["tenuto", *arguments]
    with pytest.MonkeyPatch.context() as patched:
        if env is not None:
            for name in [name for name in os.environ if name.startswith("TENUTO_")]:
                patched.delenv(name)
            for name, value in env.items():
                patched.setenv(name, value)
        if cwd is not None:
            patched.chdir(cwd)
        patched.setenv("COLUMNS", "80")
        patched.setattr(sys, "argv", command)
        patched.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        patched.setattr(sys, "stdout", out)
        patched.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as ended:
            main()
    out.flush()
    err.flush()
    status = ended.value.code or 0
    assert isinstance(status, int)
    said = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess(command, status, *said)
