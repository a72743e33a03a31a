"""The Python interface to engines in this process."""

from tenuto.api.engine import AsyncEngine, Engine

__all__ = ["AsyncEngine", "Engine"]
