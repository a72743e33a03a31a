"""An engine whose sessions take text and chat messages as well as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from weakref import WeakKeyDictionary

from tenuto.base.checks import items, shown, whole
from tenuto.base.errors import InvalidRequest, VersionMismatch
from tenuto.engine.chats import ChatLog
from tenuto.engine.engine import Engine
from tenuto.session.session import Policy, Session
from tenuto.session.turn import Turn, TurnParams
from tenuto.text.chat import ChatTemplate, Conversation
from tenuto.text.prompt import Prompt
from tenuto.text.tokenizer import Tokenizer


class ChatEngine:
    """Renders what turns are given against the history of their sessions, and has `engine` do the rest. As `engine`, it
    belongs to one thread. Where an operation takes a `version`, it is refused with `VersionMismatch` unless the
    session's is that.

    Invariant: `_logs` has an entry for every session opened here.
    """

    def __init__(self, engine: Engine, template: ChatTemplate | None, tokenizer: Tokenizer | None) -> None:
        self.engine = engine
        self._template = template
        self._tokenizer = tokenizer
        self._logs: WeakKeyDictionary[Session, ChatLog] = WeakKeyDictionary()

    def session(self, session_id: str, version: int | None = None) -> Session:
        """Raises `NotFound`, `VersionMismatch`."""
        session = self.engine.sessions.get(session_id)
        if version is not None and session.version != version:
            raise VersionMismatch(f"session {session_id} has version {session.version}, not {version}")
        return session

    def open(self, session_id: str | None = None, policy: Policy | None = None, system: str | None = None) -> Session:
        """As `Engine.open`; `system` is put before the first messages."""
        log = ChatLog(self._template, self._tokenizer, system)
        session = self.engine.open(session_id, policy)
        self._logs[session] = log
        return session

    def turn(
        self, session_id: str, prompt: Prompt, params: TurnParams, *, generate: bool = True, version: int | None = None
    ) -> Turn:
        """A turn, or without `generate` a prefill-only one."""
        session = self.session(session_id, version)
        log, start = self._logs[session], len(session.history)
        tokens, conversation = log.render(session, prompt, generate=generate)
        if not generate:
            params = replace(params, max_new_tokens=0)
        turn = self.engine.submit(session_id, tokens, _with_stops(params, log, conversation))
        log.note(start, len(tokens), conversation)
        return turn

    def one_shot(self, prompt: Prompt, params: TurnParams, policy: Policy) -> Turn:
        """The only turn of an ephemeral session."""
        session = self.open(None, replace(policy, ephemeral=True))
        try:
            return self.turn(session.id, prompt, params, generate=params.max_new_tokens != 0)
        except BaseException:
            self.engine.close(session.id)
            raise

    def regenerate(self, session_id: str, params: TurnParams, version: int | None = None) -> Turn:
        """See `Engine.regenerate`."""
        session = self.session(session_id, version)
        log = self._logs[session]
        return self.engine.regenerate(session_id, _with_stops(params, log, log.of_last_turn(session)))

    def draft(self, session_id: str, prompt: Prompt, version: int | None = None) -> Turn:
        """See `Engine.draft`."""
        session = self.session(session_id, version)
        return self.engine.draft(session_id, self._logs[session].render(session, prompt, generate=False)[0])

    def fork(
        self, session_id: str, *, turn: int | None = None, position: int | None = None, child: str | None = None
    ) -> Session:
        """See `Engine.fork`."""
        forked = self.engine.fork(session_id, turn=turn, position=position, child=child)
        self._logs[forked] = self._logs[self.session(session_id)].fork(len(forked.history))
        return forked

    def rewind(
        self, session_id: str, *, turn: int | None = None, position: int | None = None, version: int | None = None
    ) -> Session:
        """See `Engine.rewind`."""
        self.session(session_id, version)
        session = self.engine.rewind(session_id, turn=turn, position=position)
        self._logs[session].forget(len(session.history))
        return session

    def trim(self, session_id: str, turns: Sequence[int], child: str | None = None) -> Session:
        """A new session with the turns numbered `turns` (from 1, ascending) of this one. What of them stands at its
        start is shared in memory, the rest is computed when it is wanted. Raises `InvalidRequest`."""
        session = self.session(session_id)
        log = self._logs[session]
        numbers = _ascending(turns, len(session.records))
        log.check_pick(numbers)
        shared = next((n for n, number in enumerate(numbers) if number != n + 1), len(numbers))
        trimmed = self.fork(session_id, turn=shared, child=child)
        try:
            for number in numbers[shared:]:
                start = len(trimmed.history)
                taken = self._logs[trimmed].moved(log, session, number, trimmed)
                self.engine.adopt(trimmed.id, taken.input, taken.output)
                self._logs[trimmed].note(start, len(taken.input), taken.conversation)
        except BaseException:
            self.engine.close(trimmed.id)
            raise
        return trimmed


def _with_stops(params: TurnParams, log: ChatLog, conversation: Conversation | None) -> TurnParams:
    """In a conversation, what ends an answer ends the turn."""
    if params.ignore_eos:
        return params
    return replace(params, stop_ids=(*params.stop_ids, *log.stop_ids(conversation)))


def _ascending(turns: Sequence[int], most: int) -> list[int]:
    numbers = [whole("a turn number", number, 1, most) for number in items("turns", turns, "a list of turn numbers")]
    if any(later <= earlier for earlier, later in pairwise(numbers)):
        raise InvalidRequest(f"turns are {shown(numbers)}; allowed: ascending turn numbers")
    return numbers
