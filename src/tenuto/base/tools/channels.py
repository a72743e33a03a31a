"""Messages as gpt-oss writes them: Harmony, https://cookbook.openai.com/articles/openai-harmony.

An answer is one message or several, `<|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final
<|message|>the text`. The header of a call contains `to=functions.name`, before or after the channel.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tenuto.base.tools.call_text import overlap

START, CHANNEL, CONSTRAIN, MESSAGE, END = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"
_FIRST = (START, CHANNEL, MESSAGE, " to=")
_CALLED = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")


class Header(NamedTuple):
    """The part of a message before its content. `called`: the function that it calls, else empty."""

    channel: str = "final"
    called: str = ""


def header_of(text: str, *, begun: bool, ended: bool) -> tuple[Header | None, str]:
    """Parses a message's header and returns it with the text after it. The header is `None` if it is incomplete.
    `begun`: the answer has earlier messages; an answer that begins without a header is text for the user."""
    if text and not begun and not any(text.startswith(one) or one.startswith(text) for one in _FIRST):
        return Header(), text
    header, found, content = text.partition(MESSAGE)
    if found:
        channel, called = _CHANNEL.search(header), _CALLED.search(header)
        return Header(channel[1] if channel else "final", called[1] if called else ""), content
    return (Header() if text and ended and not begun else None), text


def content_end(text: str, *, ended: bool) -> tuple[int, int | None]:
    """Returns the length of the text that certainly belongs to the message's content, and the position of the next
    header, or `None` if the message has not ended."""
    ends = [(at, mark) for mark in (END, START, CHANNEL) if (at := text.find(mark)) >= 0]
    if not ends:
        held = 0 if ended else max(overlap(text, mark) for mark in (END, START, CHANNEL))
        return len(text) - held, None
    at, mark = min(ends)
    return at, at + len(mark) if mark == END else at
