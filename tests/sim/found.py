"""The error that the simulator raises when something is wrong: the rule that was broken, and how."""

from __future__ import annotations


class Found(AssertionError):
    """A broken rule. `rule` is its short name, by which a run can ignore it."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"[{rule}] {message}")
        self.rule = rule
