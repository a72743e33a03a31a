"""Client libraries. Each runs its script in `inside` in its own environment."""

from __future__ import annotations

import os
from pathlib import Path
from shutil import copy

from bench.clients.caller import CONTEXT, write_caller
from bench.clients.fetching import Fetched, call
from bench.server import server

INSIDE = Path(__file__).parent / "inside"
LIBRARIES = {
    "openai": ("openai",),
    "openai-agents": ("openai-agents",),
    "anthropic": ("anthropic",),
    "litellm": ("litellm", "mcp"),  # without mcp, requests with tools fail
    "guidance": ("guidance", "openai"),
    "langchain": ("langchain-openai", "langchain-anthropic"),
    "llama-index": ("llama-index-llms-openai-like",),
}
"""Packages of Python to install for each library."""
VERCEL = "vercel-ai"
VERCEL_PACKAGES = ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod")


def library(name: str, fetched: Fetched, place: Path) -> str:
    """Runs the script of a library. Returns the library's version."""
    caller = write_caller(place / "model", "look_up", {"city": "Rome"})
    script = INSIDE / f"{name.replace('-', '_')}_client.py"
    if name == VERCEL:
        programs, version = fetched.npm(*VERCEL_PACKAGES)
        script = Path(copy(script.with_suffix(".mjs"), programs.parent.parent))  # packages are found from its place
        command = ["node", str(script)]
    else:
        python, version = fetched.python(name, LIBRARIES[name])
        command = [str(python), "-I", str(script)]
    names = ("--served-model-name", "gpt-4o", "--served-model-name", "claude-x")
    with server(str(caller), CONTEXT, *names) as running:
        env = {"PATH": os.environ["PATH"], "HOME": str(place), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        call([*command, running.url], place, env)
    return version
