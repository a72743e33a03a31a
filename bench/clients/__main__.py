"""`python -m bench.clients [CLIENT ...]`: runs the newest versions of unmodified clients against a server.

Each client is fetched from its package index (npm or PyPI) into its own directory, by default a temporary one. It then
talks to a server that this program starts. The server's model (`caller.py`) calls a tool if it is given any, and
answers once it has the result. Frameworks that Tenuto has integrations for run the tests of these instead. After the
packages are fetched, clients connect only to this machine. The exit status is 1 if a client failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

from bench.clients.agents import aider, claude_code, codex, opencode
from bench.clients.fetching import Fetched
from bench.clients.integrations import INTEGRATIONS, integration
from bench.clients.libraries import LIBRARIES, VERCEL, library

AGENTS = {"claude-code": claude_code, "codex": codex, "opencode": opencode, "aider": aider}
CLIENTS = (*AGENTS, *LIBRARIES, VERCEL, *INTEGRATIONS)


def main(given: list[str]) -> int:
    """Runs the clients named on the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"some of {', '.join(CLIENTS)}; by default all")
    parser.add_argument("--packages", type=Path, help="a directory that keeps the packages for the next run")
    chosen = parser.parse_args(given)
    if unknown := set(chosen.clients) - set(CLIENTS):
        parser.error(f"unknown {', '.join(sorted(unknown))}; known: {', '.join(CLIENTS)}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="tenuto-clients-") as made:
        packages = (chosen.packages or Path(made) / "packages").resolve()
        for name in chosen.clients or CLIENTS:
            began = time.monotonic()
            try:
                version = run(name, Fetched(packages), Path(made) / name)
            except Exception:  # noqa: BLE001 - the other clients should still run
                traceback.print_exc()
                print(f"{name}: failed", flush=True)
                failed = True
            else:
                print(f"{name} {version}: fine, {time.monotonic() - began:.0f} s", flush=True)
    return int(failed)


def run(name: str, fetched: Fetched, place: Path) -> str:
    """Runs one client, which may write to `place`. Returns its version; raises if the client fails."""
    place.mkdir(parents=True)
    if name in INTEGRATIONS:
        return integration(name, fetched)
    return AGENTS[name](fetched, place) if name in AGENTS else library(name, fetched, place)


sys.exit(main(sys.argv[1:]))
