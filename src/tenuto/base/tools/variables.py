"""Variables of a chat template besides messages and tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tenuto.base.checks import check_json_text, check_nesting, json_text, parsed_json, shown
from tenuto.base.errors import InvalidRequest

FIELD = "chat_template_kwargs"
MAX_SIZE = 2**16
"""Maximum size of all variables, in characters of JSON."""
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
)
"""Variables that a template gets from other parts of the request."""


@dataclass(frozen=True, slots=True)
class Variables:
    """Variables of a chat template, such as `enable_thinking`: a JSON object. Those that a template does not use change
    nothing."""

    source: str = ""

    def __post_init__(self) -> None:
        """Raises `InvalidRequest`."""
        check_json_text(FIELD, self.source, MAX_SIZE)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Variables:
        """Encodes values, which must be JSON. Raises `InvalidRequest`."""
        variables = cls(json_text(FIELD, dict(given), FIELD)) if given else cls()
        variables.parsed()
        return variables

    def parsed(self) -> dict[str, Any]:
        """Parses the object. Raises `InvalidRequest`."""
        if not self.source:
            return {}
        values = parsed_json(f"{FIELD} are not JSON", self.source, FIELD)
        if not isinstance(values, dict):
            raise InvalidRequest(f"{FIELD} are {shown(values)}; allowed: an object", param=FIELD)
        check_nesting(FIELD, values, FIELD)
        if taken := RESERVED & values.keys():
            raise InvalidRequest(f"{FIELD} have {min(taken)!r}, which the request itself sets", param=FIELD)
        return values


NO_VARIABLES = Variables()
