"""Responses of Realtime: the events of a native turn become those that its clients expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenuto.serve.openai.realtime_items import Content, Entry, new_id
from tenuto.serve.openai.realtime_line import Mark, tokens_of

Event = dict[str, Any]
COMPLETED, INCOMPLETE, CANCELLED, FAILED = "completed", "incomplete", "cancelled", "failed"

Add = Callable[[Entry], str | None]
"""Adds an item to the conversation and returns the id of the item before it."""


class RealtimeAnswer:
    """A response that is being written. `entries`: its items so far. `marks`: those of its first item, if that is a
    message."""

    def __init__(self, about: dict[str, Any], add: Add | None) -> None:
        """`about`: fields of the response that stay the same. `add`: `None` if the response is not part of the
        conversation."""
        self.id = new_id("resp")
        self.entries: list[Entry] = []
        self.marks: list[Mark] = []
        self._about = about
        self._add = add
        self._delivered = 0  # number of output tokens so far
        self._marks: list[Mark] = []  # of the latest message
        self._text = ""  # of the message that is being written
        self._writing = False  # the last item is a message that is being written

    def view(self, status: str, details: dict[str, Any] | None = None, usage: dict[str, Any] | None = None) -> Event:
        """Returns the response as it is so far."""
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "output": [entry.view() for entry in self.entries],
            "usage": usage,
            **self._about,
        }

    def begin(self) -> list[Event]:
        """Returns the first event."""
        return [{"type": "response.created", "response": self.view("in_progress")}]

    def read(self, delta: dict[str, Any]) -> list[Event]:
        """Returns the events for the data of a native `delta`."""
        events: list[Event] = []
        if text := delta.get("content"):
            if not self._writing:
                events += self._open(Content("message", "assistant", ""))
                part = {"type": "text", "text": ""}
                events.append(self._of_part("response.content_part.added", part=part))
                self._text, self._writing = "", True
                self._marks = self.marks if len(self.entries) == 1 else [Mark(0, self._delivered)]
            self._text += text
            self._marks.append(Mark(len(self._text), delta["delivered"]))
            events.append(self._of_part("response.output_text.delta", delta=text))
        for call in delta.get("tool_calls", ()):
            events += self._close(COMPLETED) + self._call(call)
        self._delivered = delta["delivered"]
        return events

    def writes(self, entry: Entry) -> bool:
        """Whether this message is being written."""
        return self._writing and self.entries[-1] is entry

    @property
    def length(self) -> int:
        """The number of characters of the message that is being written."""
        return len(self._text)

    def tokens_until(self, characters: int) -> int:
        """Returns the number of output tokens up to the first `characters` of the message that is being written."""
        return tokens_of(self._marks, characters)

    @property
    def contents(self) -> tuple[Content, ...]:
        """The content of its items as they are so far."""
        contents = [entry.content for entry in self.entries]
        if self._writing:
            contents[-1] = Content("message", "assistant", self._text)
        return tuple(contents)

    def finish(
        self, status: str, details: dict[str, Any], usage: dict[str, Any] | None, heard: int | None
    ) -> list[Event]:
        """Returns the last events. `heard`: number of characters to keep of a message that is being written."""
        self._text = self._text[:heard]
        events = self._close(COMPLETED if status == COMPLETED else INCOMPLETE)
        told = self.view(status, {"type": status, **details}, usage)
        return [*events, {"type": "response.done", "response": told}]

    # -- items

    def _open(self, content: Content) -> list[Event]:
        entry = Entry(new_id("item"), content, "in_progress")
        before = self._add(entry) if self._add is not None else None
        self.entries.append(entry)
        added = [self._of_response("response.output_item.added", item=entry.view())]
        if self._add is not None:
            added.append({"type": "conversation.item.added", "previous_item_id": before, "item": entry.view()})
        return added

    def _done(self, status: str) -> list[Event]:
        entry = self.entries[-1]
        entry.status = status
        done = [self._of_response("response.output_item.done", item=entry.view())]
        if self._add is not None:
            done.insert(0, {"type": "conversation.item.done", "item": entry.view()})
        return done

    def _close(self, status: str) -> list[Event]:
        """Completes the message that is being written."""
        if not self._writing:
            return []
        self._writing = False
        self.entries[-1].content = Content("message", "assistant", self._text)
        part = {"type": "text", "text": self._text}
        return [
            self._of_part("response.output_text.done", text=self._text),
            self._of_part("response.content_part.done", part=part),
            *self._done(status),
        ]

    def _call(self, call: dict[str, Any]) -> list[Event]:
        """Adds the item of a call."""
        given = call["arguments"]
        events = self._open(Content("function_call", None, "", call["id"], call["name"]))
        self.entries[-1].content = Content("function_call", None, given, call["id"], call["name"])
        about = {"item_id": self.entries[-1].id, "call_id": call["id"]}
        return [
            *events,
            self._of_response("response.function_call_arguments.delta", delta=given, **about),
            self._of_response("response.function_call_arguments.done", arguments=given, name=call["name"], **about),
            *self._done(COMPLETED),
        ]

    def _of_response(self, name: str, /, **fields: Any) -> Event:
        return {"type": name, "response_id": self.id, "output_index": len(self.entries) - 1, **fields}

    def _of_part(self, name: str, /, **fields: Any) -> Event:
        return self._of_response(name, item_id=self.entries[-1].id, content_index=0, **fields)


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """Returns the usage of a native turn in Realtime's form."""
    prompt, cached, output = (usage[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens"))
    silent = {"audio_tokens": 0}
    return {
        "total_tokens": prompt + output,
        "input_tokens": prompt,
        "output_tokens": output,
        "input_token_details": {
            "text_tokens": prompt,
            "cached_tokens": cached,
            "cached_tokens_details": {"text_tokens": cached, **silent},
            **silent,
        },
        "output_token_details": {"text_tokens": output, **silent},
    }
