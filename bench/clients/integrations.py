"""Frameworks that `tenuto.integrations` has interfaces for. Each runs the tests of its integration, and the examples on
the page about them, in its own environment."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import tenuto
from bench.clients.fetching import Fetched, call

ROOT = Path(__file__).parent.parent.parent
INTEGRATIONS = {
    "langgraph": ("langgraph",),
    "livekit": ("livekit-agents",),
    "llm": ("llm",),
    "pipecat": ("pipecat-ai",),
}
"""Packages of Python to install for each."""
TEST_SECONDS = 500


def integration(name: str, fetched: Fetched) -> str:
    """Runs the tests of an integration. Returns the framework's version."""
    python, version = fetched.python(name, INTEGRATIONS[name])
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(call([str(python), "-c", asked], ROOT).strip())
    ours = (sysconfig.get_path("purelib"), str(Path(tenuto.__file__).parent.parent))
    (packages / "ours.pth").write_text("\n".join(ours))  # after the framework's own packages
    call([str(python), "-c", f"import tenuto.integrations.{name}"], ROOT)  # otherwise tests would be skipped
    tests = [f"tests/integrations/test_{name}.py", "tests/docs/test_examples.py"]
    chosen = ["-k", f"test_{name} or example_runs and integrations"]
    call([str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *tests], ROOT, seconds=TEST_SECONDS)
    return version
