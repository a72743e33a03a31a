"""Tenuto: an LLM inference server in which the session, not the request, owns model state.

What is public is listed by `tenuto.api`, which runs models, and `tenuto.client`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenuto.api import *  # noqa: F403 - see above
    from tenuto.client import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that `import tenuto` and `tenuto --help` are fast."""
    if name in ("AsyncEngine", "Engine"):  # all others load no model code
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
