"""The examples on all pages run as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tenuto.serve.shared.settings import read_keys
from tests.docs.pages import PAGES, ROOT, Block, blocks, name_of
from tests.serve.server import Server, serving

SERVER = "http://127.0.0.1:8000"
"""The address of the server in examples."""
RUN = ("python", "sh")
COMMANDS = ("curl", "llm")
"""Commands that examples use and that may be missing."""
FRAMEWORKS = {name: f"python -m bench.clients {name}" for name in ("langgraph", "livekit", "pipecat")}
FRAMEWORKS["ray"] = "make test-ray"
"""Packages that examples use and that may be missing, and what runs these examples."""
CHECKED = ("toml", "text", "yaml")
"""Languages of blocks that are output, drawings or files, and are not run."""
MARKED = 14
"""The most blocks that may be marked as not run."""


def require_frameworks(example: Block) -> None:
    """Skips the test if a framework is not installed."""
    for name, runner in FRAMEWORKS.items():
        if re.search(rf"^from {name}\b", example.text, re.MULTILINE):
            pytest.importorskip(name, reason=f"{name} is not installed; {runner} runs this")


def runnable(language: str) -> list[Block]:
    return [block for block in blocks(language) if block.not_run is None]


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Server]:
    with serving("--model", "smollm2", "--context-length", "1024") as running:
        yield running
        running.audit()


@pytest.mark.parametrize("example", runnable("python"), ids=str)
def test_a_python_example_runs(
    example: Block, request: pytest.FixtureRequest, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_frameworks(example)
    code = example.text
    if SERVER in code:
        code = code.replace(SERVER, request.getfixturevalue("server").url)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, str(example), "exec", dont_inherit=True), namespace)
    if "client" in namespace:  # scripts leave this to the end of the process
        namespace["client"].close()
    assert capsys.readouterr().out


@pytest.mark.parametrize("example", runnable("sh"), ids=str)
def test_a_shell_example_runs(example: Block, server: Server, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in COMMANDS:
        if re.search(rf"\b{command} ", example.text) and shutil.which(command, path=path) is None:
            pytest.skip(f"the example is for those who have {command}")
    script = example.text.replace(SERVER, server.url).replace("curl ", "curl --fail-with-body ")
    environment = {**os.environ, "PATH": path, "TENUTO_URL": server.url, "LLM_USER_PATH": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-ec", script], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    if "/turns -H" in script:
        assert "event: committed" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_a_page_is_in_a_language_that_is_run_or_checked(page: Path) -> None:
    fences = re.findall(r"^```", page.read_text(encoding="utf-8"), re.MULTILINE)
    found = [block for block in blocks() if block.page == name_of(page)]
    assert len(fences) == 2 * len(found), "a block is not closed, or indented"
    assert {block.language for block in found} <= {*RUN, *CHECKED}


def test_few_blocks_are_marked_as_not_run() -> None:
    marked = [block for block in blocks(*RUN) if block.not_run is not None]
    assert len(marked) <= MARKED, [f"{block}: {block.not_run}" for block in marked]


def test_the_key_file_on_the_operations_page_is_valid(tmp_path: Path) -> None:
    (example,) = [block for block in blocks("toml") if "[[keys]]" in block.text]
    path = tmp_path / "keys.toml"
    path.write_text(example.text)
    keys = read_keys(path, None, None)
    tenant = keys.tenant("test")
    assert tenant is not None
    assert (tenant.name, tenant.limits.turns) == ("acme", 32)
    assert keys.weights == (("acme", 2),)
