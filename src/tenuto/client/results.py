"""The results of a turn's calls, which are computed as they come."""

from __future__ import annotations

from typing import Any

from tenuto.base.checks import shown
from tenuto.base.errors import IllegalTransition, InvalidRequest
from tenuto.base.tools.definitions import ToolCall
from tenuto.client.core import TurnReader


class Results:
    """Collects the results of a turn's calls, in the order of the calls."""

    def __init__(self, turn: TurnReader) -> None:
        self._turn = turn
        self._found: dict[str, dict[str, Any]] = {}  # by the id of the call
        self._drafted = 0  # how many of the first results have been drafted

    def put(self, call: ToolCall | str, content: str) -> None:
        """Adds the result of a call, which is given itself or by its id. Raises `InvalidRequest`."""
        name = call.id if isinstance(call, ToolCall) else call
        made = next((each for each in self._turn.said.calls if each.id == name), None)
        if made is None:
            known = ", ".join(each.id for each in self._turn.said.calls) or "none yet"
            raise InvalidRequest(f"the turn has made no call {shown(name)}; allowed: {known}")
        if made.id in self._found:
            raise InvalidRequest(f"call {made.id} has a result already")
        if not isinstance(content, str):
            raise InvalidRequest(f"the result of call {made.id} is a {type(content).__name__}; allowed: text")
        self._found[made.id] = {"role": "tool", "tool_call_id": made.id, "name": made.name, "content": content}

    def due(self) -> list[dict[str, Any]]:
        """Returns the messages to draft now; none unless the turn has ended and the first results have become more. All
        results before a drafted one are there."""
        first: list[dict[str, Any]] = []
        if self._turn.result is None:
            return first
        for call in self._turn.said.calls:
            if call.id not in self._found:
                break
            first.append(self._found[call.id])
        if len(first) <= self._drafted:
            return []
        self._drafted = len(first)
        return first

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages with all results, in the order of the calls: the input of the next turn. Raises
        `IllegalTransition` while the turn is open, if it was rolled back, or if a result is missing."""
        result = self._turn.result
        if result is None or not result.committed:
            raise IllegalTransition(
                "the turn was rolled back" if result is not None else "the turn has not been read to its end"
            )
        missing = [call.id for call in self._turn.said.calls if call.id not in self._found]
        if missing:
            raise IllegalTransition(f"these calls have no result yet: {', '.join(missing)}")
        return [self._found[call.id] for call in self._turn.said.calls]
