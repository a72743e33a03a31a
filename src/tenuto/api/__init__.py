"""The Python interface to engines that run in this process."""

from tenuto.api.engine import AsyncEngine, Engine

__all__ = ["AsyncEngine", "Engine"]
