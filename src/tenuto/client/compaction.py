"""The compaction of a session on a server: its options, and the request and answer in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from tenuto.base.checks import MAX_COUNT, whole
from tenuto.base.errors import InvalidRequest
from tenuto.base.options import TurnOptions, turn_params
from tenuto.base.tools.tool_use import ToolUse
from tenuto.base.turns import Input, turn_input
from tenuto.base.views import Compacted
from tenuto.base.wire.bodies import read_body
from tenuto.client.transport import Options
from tenuto.client.wire import input_body, turn_body, valid_answer


class CompactionOptions(TypedDict, total=False):
    """Options of a compaction, all optional.

    `summary`: a text, as the assistant's words. `input`: in its place, the input of the turn that replaces the others.
    Without both the model writes the summary: up to `max_new_tokens`, 2048 if not given, at `temperature`, 0 if not
    given. `instructions`: what asks the model for the summary, or stands before a given one. `priority`: that of the
    compaction's turns; one below the session's if not given. `tools`: those that the conversation began with, if its
    first turn is replaced.

    `if_version`: the version that the session must have until it is compacted. If not given, turns may be added
    meanwhile, and follow the summary.
    """

    summary: str | None
    input: Input | None
    instructions: str | None
    max_new_tokens: int | None
    temperature: float
    priority: int | None
    tools: Sequence[Mapping[str, Any]] | None
    if_version: int | None


def compaction_body(first: int, last: int | None, options: Options) -> dict[str, Any]:
    """Returns the JSON body of a compaction of the turns `first` to `last`. Raises `InvalidRequest`."""
    allowed, asked = CompactionOptions.__annotations__.keys(), dict[str, Any](options)
    if unknown := asked.keys() - allowed:
        raise InvalidRequest(f"unknown options of a compaction {sorted(unknown)}; allowed: {sorted(allowed)}")
    of_turn = {name: asked[name] for name in asked.keys() & TurnOptions.__annotations__.keys()}
    body = turn_body("turn", turn_params(cast("TurnOptions", of_turn)), of_turn)
    body["first"] = whole("first", first, 1, MAX_COUNT)
    if last is not None:
        body["last"] = whole("last", last, 1, MAX_COUNT)
    body |= {name: asked.get(name) for name in ("summary", "instructions")}
    if asked.get("input") is not None:
        body["input"] = input_body(turn_input(asked["input"]))
    if asked.get("tools") is not None:
        body["tools"] = list(ToolUse.of(asked["tools"]).functions)
    return body


def compacted_from(body: Any) -> Compacted:
    """Converts the JSON answer to a compaction. Raises `TenutoError` if it has another form."""
    with valid_answer():
        return read_body(Compacted, {**body, "info": body})
