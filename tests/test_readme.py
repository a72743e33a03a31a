"""What the README shows is true: its examples run as they stand."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenuto.serve.shared.settings import read_keys
from tests.serve.server import Server, serving

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SERVER = "http://127.0.0.1:8000"
"""Where the examples expect a server."""


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Server]:
    with serving("--model", "smollm2", "--context-length", "1024") as running:
        yield running
        running.audit()


@pytest.mark.parametrize("example", examples("python"), ids=map(str, itertools.count()))
def test_a_python_example_of_the_readme_runs(
    example: str, request: pytest.FixtureRequest, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if SERVER in example:
        example = example.replace(SERVER, request.getfixturevalue("server").url)
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


@pytest.mark.skipif(shutil.which("curl") is None, reason="the example is for those who have curl")
@pytest.mark.parametrize(
    "example", [text for text in examples("sh") if "curl" in text], ids=map(str, itertools.count())
)
def test_a_shell_example_of_the_readme_runs(example: str, server: Server) -> None:
    script = example.replace(SERVER, server.url).replace("curl ", "curl --fail-with-body ")
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "event: committed" in done.stdout


def test_the_key_file_of_the_readme_is_one(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(examples("toml")[0])
    keys = read_keys(path, None, None)
    tenant = keys.tenant("test")
    assert tenant is not None
    assert (tenant.name, tenant.limits.turns) == ("acme", 32)
    assert keys.weights == (("acme", 2),)


def test_the_readme_names_targets_and_commands_that_exist() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    shown = subprocess.run(
        [str(Path(sys.executable).parent / "tenuto"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    for command in re.findall(r"^tenuto (\w+)", README, re.MULTILINE):
        assert re.search(rf"^  {command} ", shown, re.MULTILINE)
