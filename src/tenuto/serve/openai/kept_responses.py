"""Stored responses that can be read again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from tenuto.serve.openai.response_answers import Form
from tenuto.serve.openai.response_schemas import Item, ResponseBody
from tenuto.serve.shared.edge import of_tenant
from tenuto.serve.shared.kept import Kept


@dataclass(frozen=True, slots=True)
class Origin:
    """The turn that writes a response, and the form of its items. `turn`: the turn's id. `form`: the form of its items.
    `ended`: set once a response in the background has ended; `None` for other responses."""

    turn: str
    form: Form
    ended: asyncio.Event | None


class KeptResponses(Kept):
    """The latest stored responses of a tenant. Sessions of older responses stay open. `items`: the lists of input items
    of these responses as JSON; those of the oldest may be missing.

    Invariant: `origins` are those of the kept responses, by their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.items = Kept()
        self.origins: dict[str, Origin] = {}

    def begin(self, name: str, response: bytes, origin: Origin, items: bytes | None) -> None:
        """Stores a response with its origin and its input items."""
        self.keep(name, response)
        if self.find(name) is not None:
            self.origins[name] = origin
            if items is not None:
                self.items.keep(name, items)

    def end(self, name: str, response: bytes) -> None:
        """Replaces a response that has ended, unless it is no longer kept."""
        origin, items = self.origins.get(name), self.items.find(name)
        if origin is not None:
            self.begin(name, response, origin, items)

    def before(self, body: ResponseBody) -> list[Item] | None:
        """Returns the items of the conversation that a request continues, if they are all kept."""
        items = self.chain(body.previous_response_id or "")
        return [Item.model_validate(item) for item in items] if items else None

    def chain(self, name: str) -> list[dict[str, Any]] | None:
        """Returns the items, as JSON, of a response's whole conversation: the input and output of the responses before
        it, and its own. `None` if any of them is not kept."""
        links, before = [], name
        while before:
            response, items = self.find(before), self.items.find(before)
            if response is None or items is None:
                return None
            found = msgspec.json.decode(response)
            links.append([*msgspec.json.decode(items), *found["output"]])
            before = found["previous_response_id"]
        return [item for link in reversed(links) for item in link]

    def forget(self, name: str) -> None:
        super().forget(name)
        self.items.forget(name)
        self.origins.pop(name, None)


KeptOf = Annotated[KeptResponses, of_tenant(KeptResponses)]
