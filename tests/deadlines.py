"""The settings of Hypothesis for all tests."""

from __future__ import annotations

from hypothesis import settings


def allow_any_time() -> None:
    """Lets examples take any time, since no test asserts on time. For each process that runs tests."""
    settings.register_profile("tenuto", deadline=None)
    settings.load_profile("tenuto")
