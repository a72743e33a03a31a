"""What the simulator says when something is wrong: which of its rules was broken, and how."""

from __future__ import annotations


class Found(AssertionError):
    """A rule is broken. `rule` is its short name, by which a run can be told to look past it."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"[{rule}] {message}")
        self.rule = rule
