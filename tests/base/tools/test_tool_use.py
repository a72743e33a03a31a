"""The use of tools in a turn: the choice, the rendered functions, and refusals by field."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.tool_use import ToolUse
from tests.base.tools.calls import SCHEMA, TAGS


def test_tools_are_rendered_whatever_the_choice() -> None:
    tools = [{"name": "weather", "parameters": SCHEMA}]
    assert ToolUse.of(tools, "none").definitions == ToolUse.of(tools).definitions
    assert ToolUse.of(tools, "none").reading(TAGS, None).names == ()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"name": "x\n"}]}, "tools[0].name"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [{"name": "f", "strict": 1}]}, "tools[0].strict"),
        ({"tools": [{"name": "f", "parameters": {"description": "\ud800"}}], "tool_choice": "required"}, "tools"),
    ],
    ids=str,
)
def test_invalid_tools_are_refused_by_their_field(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ToolUse.among(options)
    assert refused.value.param == param


def test_extra_fields_of_a_function_are_not_rendered() -> None:
    wrapped = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
    assert ToolUse.of([wrapped]).definitions == ToolUse.of([{"name": "weather", "parameters": SCHEMA}]).definitions
