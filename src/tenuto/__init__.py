"""Tenuto: an LLM inference server in which the session, not the request, owns model state.

The public names are those of `tenuto.api`, which runs models, and `tenuto.client`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenuto.api import *  # noqa: F403 - the public names
    from tenuto.client import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Loads public names on first use, so that `import tenuto` and `tenuto --help` are fast."""
    if name in ("AsyncEngine", "Engine"):  # only these load model code
        return getattr(import_module("tenuto.api"), name)
    client = import_module("tenuto.client")
    if name == "__all__":
        return sorted(["AsyncEngine", "Engine", *client.__all__])
    if name not in client.__all__:
        raise AttributeError(f"module 'tenuto' has no attribute {name!r}")
    return getattr(client, name)


def __dir__() -> list[str]:
    names: list[str] = __getattr__("__all__")
    return names
