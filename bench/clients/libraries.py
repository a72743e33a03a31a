"""Python client libraries. Each runs its script in `inside` in its own environment."""

from __future__ import annotations

import os
from pathlib import Path

from bench.clients.caller import CONTEXT, write_caller
from bench.clients.fetching import Fetched, call
from bench.server import server

LIBRARIES = {
    "openai": ("openai",),
    "openai-agents": ("openai-agents",),
    "anthropic": ("anthropic",),
    "litellm": ("litellm", "mcp"),  # without mcp, requests with tools fail
    "guidance": ("guidance", "openai"),
}
"""Packages to install for each library."""


def library(name: str, fetched: Fetched, place: Path) -> str:
    """Runs the script of a library. Returns the library's version."""
    python, version = fetched.python(name, LIBRARIES[name])
    caller = write_caller(place / "model", "look_up", {"city": "Rome"})
    script = Path(__file__).parent / "inside" / f"{name.replace('-', '_')}_client.py"
    names = ("--served-model-name", "gpt-4o", "--served-model-name", "claude-x")
    with server(str(caller), CONTEXT, *names) as running:
        env = {"PATH": os.environ["PATH"], "HOME": str(place), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        call([str(python), "-I", str(script), running.url], place, env)
    return version
