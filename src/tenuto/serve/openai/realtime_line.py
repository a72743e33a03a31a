"""The engine's session behind a Realtime conversation. The client edits items; before each response the session is
brought to the longest beginning of the conversation that it has committed."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tenuto.base.errors import NotFound, SessionClosed
from tenuto.serve.openai.realtime_items import Content, new_id
from tenuto.serve.shared.sockets import Refused

GONE = (NotFound.code, SessionClosed.code)

Head = tuple[str, str]
"""What precedes the items of a conversation: instructions, and the definitions of functions as JSON."""


class Ask(Protocol):
    """Carries out a native request, as `Service.ask` does."""

    def __call__(self, method: str, path: str, value: Any = None) -> Awaitable[Any]: ...


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in an answer: its first `characters` were written by the first `tokens` of the output."""

    characters: int
    tokens: int


def tokens_of(marks: Sequence[Mark], characters: int) -> int:
    """Returns the number of output tokens whose text is among the first `characters`."""
    return max((mark.tokens for mark in marks if mark.characters <= characters), default=0)


@dataclass(frozen=True, slots=True)
class Spoken:
    """A committed turn. `asked` and `said`: its items. `prompt`: the number of tokens before its output. `marks`:
    those of its first item, in order."""

    asked: tuple[Content, ...]
    said: tuple[Content, ...]
    prompt: int
    marks: Sequence[Mark]

    def cut_to(self, said: Content) -> int | None:
        """Returns the number of output tokens to keep if the answer is to be `said`, its beginning; otherwise
        `None`."""
        whole = self.said[0] if self.said else None
        if whole is None or (whole.type, whole.role) != (said.type, said.role) or whole.type != "message":
            return None
        return tokens_of(self.marks, len(said.text)) if whole.text.startswith(said.text) else None


class Line:
    """A session of the engine, opened when it is needed. `turns`: what it has committed.

    Invariant: while no response is being written, the session's turns are `turns`, unless it has been closed by others.
    """

    def __init__(
        self, ask: Ask, name: str, adapter: str | None, head: Head | None = None, turns: Sequence[Spoken] = ()
    ) -> None:
        """`name`: the id of the session."""
        self.open = False
        self.turns = list(turns)
        self._ask = ask
        self._name = name
        self._adapter = adapter
        self._head = head
        self._drafts = False  # a draft may be open

    @property
    def path(self) -> str:
        """The path of the session."""
        return f"/v1/sessions/{self._name}"

    async def go_to(self, head: Head, wanted: Sequence[Content]) -> int:
        """Brings the session to the longest beginning of `wanted` that it has. Returns the number of items in it.
        Raises `Refused`."""
        if head != self._head:
            await self.close()
        self._head = head
        have, turns, place = self._common(wanted)
        if place is not None:
            if self._drafts:
                await self.drop_draft()
            await self._asked("POST", "/rewind", place)
            self.turns = turns
        if not self.open:
            await self._ask("POST", "/v1/sessions", {"id": self._name, "adapter": self._adapter})
            self.open = True
        return have

    def _common(self, wanted: Sequence[Content]) -> tuple[int, list[Spoken], dict[str, int] | None]:
        """Returns the number of leading items that the session has, the turns that stay, and the place to rewind it to,
        if any."""
        number, have = self._equal(wanted)
        if number == len(self.turns):
            return have, self.turns, None
        turn = self.turns[number]
        asked = have + len(turn.asked)
        if tuple(wanted[have:asked]) == turn.asked and asked < len(wanted):
            kept = turn.cut_to(wanted[asked])
            if kept is not None:
                heard = replace(turn, said=(wanted[asked],))
                return asked + 1, [*self.turns[:number], heard], {"position": turn.prompt + kept}
        return have, self.turns[:number], {"turn": number}

    def _equal(self, wanted: Sequence[Content]) -> tuple[int, int]:
        """Returns the number of leading turns that `wanted` begins with, and of their items. A turn without an answer
        is not among them: to the model it is answered by an empty message, which the conversation lacks."""
        have = 0
        for number, turn in enumerate(self.turns):
            items = (*turn.asked, *turn.said)
            if not turn.said or tuple(wanted[have : have + len(items)]) != items:
                return number, have
            have += len(items)
        return len(self.turns), have

    async def draft(self, messages: list[dict[str, Any]]) -> None:
        """Computes input ahead of its turn. Raises `Refused`."""
        self._drafts = True
        await self._asked("PUT", "/draft", {"input": messages})

    async def drop_draft(self) -> None:
        """Drops the draft. Raises `Refused`."""
        self._drafts = False
        try:
            await self._asked("POST", "/abort", {})
        except Refused as refused:
            if refused.failure.code != "illegal_transition":  # it has timed out
                raise

    def committed(self, turn: Spoken) -> None:
        """Adds a turn, which has become of the draft if there was one."""
        self._drafts = False
        self.turns.append(turn)

    def lost(self) -> None:
        """Handles a session that has been closed by others."""
        self.open, self.turns, self._drafts = False, [], False

    async def _asked(self, method: str, action: str, value: Any) -> Any:
        try:
            return await self._ask(method, self.path + action, value)
        except Refused as refused:
            if refused.failure.code in GONE:
                self.lost()
            raise

    async def branch(self, head: Head, wanted: Sequence[Content]) -> Line:
        """Returns another line for `wanted`: a fork of this one if both begin alike. Raises `Refused`."""
        number, _ = self._equal(wanted)
        name = new_id("sess")
        if not self.open or head != self._head or not number:
            return Line(self._ask, name, self._adapter)
        await self._asked("POST", "/fork", {"id": name, "turn": number})
        line = Line(self._ask, name, self._adapter, head, self.turns[:number])
        line.open = True
        return line

    async def close(self) -> None:
        """Closes the session, if it is open. Raises `Refused`."""
        was_open = self.open
        self.lost()
        try:
            if was_open:
                await self._ask("DELETE", self.path)
        except Refused as refused:
            if refused.failure.code not in GONE:
                raise
