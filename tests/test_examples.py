"""The examples run without an error or a warning."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.server import Server, serving

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


SERVER = "TENUTO_URL"
"""The variable by which examples find a server."""


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Server]:
    with serving("--context-length", "1024") as running:
        yield running
        running.audit()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(
    example: Path,
    request: pytest.FixtureRequest,
    smollm2_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if SERVER in example.read_text(encoding="utf-8"):
        monkeypatch.setenv(SERVER, request.getfixturevalue("server").url)
    runpy.run_path(str(example), run_name="__main__")
    assert "prompt tokens were there already" in capsys.readouterr().out
