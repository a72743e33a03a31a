"""What a simulated fleet raises if it is wrong."""

from __future__ import annotations


class Violation(AssertionError):
    """A replica has broken a promise."""
