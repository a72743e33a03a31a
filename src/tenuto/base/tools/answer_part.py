"""A part of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tenuto.base.tools.definitions import ToolCall


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer: its text, the thoughts before it, and calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)

    def add(self, other: AnswerPart) -> None:
        """Appends a later part."""
        self.text += other.text
        self.reasoning += other.reasoning
        self.calls += other.calls

    def message(self) -> dict[str, Any]:
        """Returns the assistant's message of a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": None if self.calls and not self.text else self.text}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.body() for call in self.calls]
        return message
