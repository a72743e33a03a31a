"""The command `llm` from the package index talks to a server by our plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.server import Server

pytest.importorskip("llm", reason="llm is not installed; python -m bench.clients llm runs this")


def test_a_conversation_goes_on_in_another_process_without_computing_it_again(
    smollm2_server: Server, tmp_path: Path
) -> None:
    def llm(*arguments: str) -> str:
        env = {**os.environ, "TENUTO_URL": smollm2_server.url, "LLM_USER_PATH": str(tmp_path)}
        command = [sys.executable, "-m", "llm", *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "tenuto" in llm("models")
    assert llm("-m", "tenuto", "-s", "You answer in one sentence.", "-o", "max_tokens", "24", "What is coffee?").strip()
    assert llm("-c", "-o", "max_tokens", "8", "And what is tea?").strip()
    first, second = sorted(json.loads(llm("logs", "--json")), key=lambda entry: entry["id"])
    assert second["conversation_id"] == first["conversation_id"]
    cached = json.loads(second["token_details"])["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["input_tokens"] + first["output_tokens"] - 1
    assert second["input_tokens"] > cached
