"""Lines that clients put into system messages and that change with every request, so that no prompt would begin like an
earlier one. They are left out, and a header of the answer counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tenuto.base.turns import Message
from tenuto.serve.shared.answer_headers import VOLATILE, answer_headers
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.settings import ServeSettings, line_rule

KNOWN = (r"x-anthropic-billing-header:.*",)
"""Regular expressions of known lines. Claude Code's first line names its version and a checksum of the request."""


def without_volatile_lines(edge: Edge, messages: Sequence[Message]) -> list[Message]:
    """Returns messages without the lines that this server leaves out."""
    return edge.part(VolatileLines, edge.settings).removed(messages)


class VolatileLines:
    """The lines that a server leaves out."""

    def __init__(self, settings: ServeSettings) -> None:
        known = () if settings.keep_volatile_lines else KNOWN
        self._rules = [line_rule(rule) for rule in (*known, *settings.volatile_line)]

    def removed(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages without such lines at the beginning and the end of system messages. Lines between others
        stay. A header of the answer counts those left out."""
        if not self._rules:
            return list(messages)
        stable = [self._stable(message) if message.role == "system" else message for message in messages]
        count = sum(
            before.content.count("\n") - after.content.count("\n") + (not after.content)
            for before, after in zip(messages, stable, strict=True)
            if before is not after
        )
        if count:
            answer_headers()[VOLATILE] = str(count)
        return [after for before, after in zip(messages, stable, strict=True) if after.content or before is after]

    def _stable(self, message: Message) -> Message:
        lines = message.content.split("\n")
        first, end = 0, len(lines)
        while first < end and self._matches(lines[first]):
            first += 1
        while end > first and self._matches(lines[end - 1]):
            end -= 1
        return message if end - first == len(lines) else replace(message, content="\n".join(lines[first:end]))

    def _matches(self, line: str) -> bool:
        return any(rule.fullmatch(line) for rule in self._rules)
