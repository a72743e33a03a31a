"""Tools and calls in a conversation, for chat templates with and without support for tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tenuto.base.tools.definitions import (
    CHANNELS,
    MARKS,
    TAGS,
    THOUGHTS,
    ModelHabits,
    Thinks,
    ToolCall,
    ToolFormat,
    Tools,
)
from tenuto.base.turns import Message

INSTRUCTIONS = (
    "You can call these functions:\n{tools}\n"
    'To call one, answer with nothing but a JSON object: {{"name": its name, "arguments": an object}}. '
    "To call several, answer with a list of such objects."
)
"""Instructions for models whose template does not support tools."""
Protect = Callable[[str], str]


def habits_of(source: str, prompt: str, control: Callable[[str], int | None]) -> ModelHabits:
    """Infers from a chat template how its model writes calls and thoughts. `prompt`: the text that asks for an answer.
    `control` returns the control token with a given text, if there is one."""

    def written(texts: Sequence[str]) -> tuple[tuple[str, int], ...]:
        found = ((text, control(text)) for text in texts if text in source)
        return tuple((text, token) for text, token in found if token is not None)

    tools = _format_of(source)
    return ModelHabits(
        tools=tools,
        marks=written((*(CHANNELS if tools == "channels" else MARKS), *TAGS.get(tools, ()), *THOUGHTS)),
        short_ids="[TOOL_CALLS]" in source and "[ARGS]" not in source,
        arguments="parameters" if '"parameters": ' in source and tools == "json" else "arguments",
        thinks=thinks_of(source, prompt),
    )


def _format_of(source: str) -> ToolFormat:
    """Infers the format of a model's calls from the source of its chat template."""
    signs: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
        ("channels", ("<|channel|>", "<|message|>")),
        ("functions", ("<function=", "<parameter=")),
        ("list", ("<TOOLCALL>",)),
        ("tags", ("<tool_call>",)),
        ("named", ("[ARGS]",)),
    )
    return next((name for name, texts in signs if all(text in source for text in texts)), "json")


def thinks_of(source: str, prompt: str) -> Thinks:
    """Infers how a model thinks from the source of its chat template and the text that asks for an answer."""
    if "</think>" not in source:
        return "no"
    return "opened" if prompt.rstrip().endswith("<think>") else "tags"


def for_template(message: Message, protect: Protect) -> dict[str, Any]:
    """Returns a message in the form expected by templates that support tools."""
    raw: dict[str, Any] = {"role": message.role, "content": protect(message.content)}
    if message.tool_calls:
        raw["tool_calls"] = [_call(call, protect) for call in message.tool_calls]
    if message.tool_call_id:
        raw["tool_call_id"] = protect(message.tool_call_id)
    if message.name:
        raw["name"] = protect(message.name)
    if message.reasoning:
        raw["reasoning_content"] = protect(message.reasoning)
    return raw


def _call(call: ToolCall, protect: Protect) -> dict[str, Any]:
    function = {"name": protect(call.name), "arguments": protected(call.parsed(), protect)}
    return {"type": "function", "id": protect(call.id), "function": function}


def protected(value: Any, protect: Protect) -> Any:
    """Returns a JSON value with `protect` applied to every string in it."""
    if isinstance(value, str):
        return protect(value)
    if isinstance(value, list):
        return [protected(one, protect) for one in value]
    if isinstance(value, dict):
        return {protect(key): protected(one, protect) for key, one in value.items()}
    return value


def without_tools(messages: Sequence[Message], tools: Tools, *, system: bool, results: bool) -> list[Message]:
    """Returns the messages for a template that does not support tools. Definitions go into the system message, or into
    the first message if the template has no `system` messages; calls into the text of their message. Results become
    messages of the user unless the template writes `results`."""
    told = [_plain(message) for message in (messages if results else _results_said(messages))]
    if not tools:
        return told
    functions = [tool.get("function", tool) for tool in tools.parsed()]
    text = INSTRUCTIONS.format(tools="\n".join(json.dumps(each, ensure_ascii=False) for each in functions))
    if told and (told[0].role == "system" or not system):
        told[0] = replace(told[0], content=f"{told[0].content}\n\n{text}")
    else:
        told.insert(0, Message("system", text))
    return told


def _results_said(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with results of calls as messages of the user, each joined with the user's messages beside
    it."""
    told, names, joins = list[Message](), dict[str, str](), False
    for each in messages:
        names |= {call.id: call.name for call in each.tool_calls}
        result = each.role == "tool"
        said = _result_said(each, names) if result else each
        if told and told[-1].role == said.role == "user" and (result or joins):
            told[-1], joins = replace(told[-1], content=f"{told[-1].content}\n\n{said.content}"), True
        else:
            told.append(said)
            joins = result
    return told


def _result_said(message: Message, names: Mapping[str, str]) -> Message:
    name = message.name or names.get(message.tool_call_id, "")
    return Message("user", f"Result of {name}:\n{message.content}" if name else f"Result:\n{message.content}")


def _plain(message: Message) -> Message:
    if not message.tool_calls:
        return Message(message.role, message.content, name=message.name)
    calls = [{"name": call.name, "arguments": call.parsed()} for call in message.tool_calls]
    text = json.dumps(calls if len(calls) > 1 else calls[0], ensure_ascii=False)
    return Message(message.role, f"{message.content}\n{text}" if message.content else text)


def texts_of(messages: Sequence[Message], tools: Tools) -> list[str]:
    """Returns all texts of messages and tools, which users may have written."""
    texts = [tools.source]
    for message in messages:
        texts += (message.content, message.name, message.tool_call_id, message.reasoning)
        for call in message.tool_calls:  # arguments without escapes, as in templates
            texts += (call.name, json.dumps(call.parsed(), ensure_ascii=False), call.id)
    return texts
