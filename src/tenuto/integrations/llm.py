"""A plugin of the command `llm`: `llm install tenuto`, or `pip install tenuto[llm]`. Its model `tenuto` is that of the
server at `TENUTO_URL`, and each conversation continues a session there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import llm
from llm.default_plugins.openai_models import Chat

URL = "http://127.0.0.1:8000"


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Adds the model. No request is sent before it is used."""
    register(Tenuto())


class Tenuto(Chat):
    """A server's model. Conversations are known by their ids, as to the server."""

    needs_key = None

    def __init__(self) -> None:
        url = os.environ.get("TENUTO_URL", URL)
        options = {"can_stream": True, "supports_schema": True, "supports_tools": True}
        super().__init__("tenuto", model_name="default", api_base=f"{url}/v1", **options)

    def execute(
        self,
        prompt: Any,
        stream: bool,
        response: Any,
        conversation: Any = None,
        key: str | None = None,
    ) -> Iterator[Any]:
        named = copy(self)
        named.headers = {"x-session-id": conversation.id} if conversation is not None else {}
        if given := os.environ.get("TENUTO_API_KEY"):
            named.headers["authorization"] = f"Bearer {given}"
        yield from Chat.execute(named, prompt, stream, response, conversation, key)
