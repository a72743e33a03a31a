"""An engine whose sessions take text and chat messages as well as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from tenuto.base.checks import items, shown, whole
from tenuto.base.errors import InvalidRequest, InvariantError, NotFound, VersionMismatch
from tenuto.base.options import Policy, TurnParams
from tenuto.engine.engine import Engine
from tenuto.engine.rendering import Basis, Prepared, Renderer, check_pick
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tenuto.text.chat import ChatTemplate, Conversation
from tenuto.text.prompt import Prompt
from tenuto.text.tokenizer import Tokenizer


class ChatEngine:
    """Renders what turns are given against the history of their sessions, and has `engine` do the rest. As `engine`, it
    belongs to one thread, except for `guess` and `prepare`. Where an operation takes a `version`, it is refused with
    `VersionMismatch` unless the session's is that.

    `turn` and `draft` render and begin in one go. Whoever must not hold the engine up meanwhile gets a `basis`, or
    guesses one, prepares the input in another thread, and gives it to `begin` or `begin_draft`."""

    def __init__(self, engine: Engine, template: ChatTemplate | None, tokenizer: Tokenizer | None) -> None:
        self.engine = engine
        self._template = template
        self._tokenizer = tokenizer
        self._renderer = Renderer(template, tokenizer)

    def session(self, session_id: str, version: int | None = None, *, tenant: str = "") -> Session:
        """Raises `NotFound`, `VersionMismatch`."""
        session = self.engine.sessions.get(session_id, tenant)
        if version is not None and session.version != version:
            raise VersionMismatch(f"session {session_id} has version {session.version}, not {version}")
        return session

    def open(self, session_id: str | None = None, policy: Policy | None = None, system: str | None = None) -> Session:
        """As `Engine.open`; `system` is put before the first messages. Raises `ContextExceeded` if it alone would not
        fit, and `InvalidRequest` if there is no template for it."""
        if system is not None and not isinstance(system, str):
            raise InvalidRequest(f"system is {shown(system)}; allowed: text, or none")
        if system is not None and self._template is None:
            raise InvalidRequest("a system message needs a model with a chat template")
        if system is not None and self._tokenizer is not None:
            self.opening().room(generate=True).require(self._tokenizer.least_tokens(system.strip()))
        return self.engine.open(session_id, policy, system)

    # -- input in steps

    def basis(self, session_id: str, version: int | None = None, *, tenant: str = "") -> Basis:
        """What the session's next input is to be rendered against. Raises `NotFound`, `VersionMismatch`."""
        return Basis.of(self.session(session_id, version, tenant=tenant))

    def guess(self, session_id: str, *, tenant: str = "") -> Basis | None:
        """As `basis`, for any thread: what it returns may have changed meanwhile, or never have been so, and `begin`
        will tell. `None` if there is nothing to go by."""
        try:
            return self.basis(session_id, tenant=tenant)
        except (NotFound, LookupError):  # it changes while it is looked at
            return None

    def opening(self) -> Basis:
        """What the input of an ephemeral session is rendered against. For any thread."""
        return Basis(session="", history=0, limit=self.engine.config.context_length)

    def prepare(self, basis: Basis, prompt: Prompt, *, generate: bool) -> Prepared:
        """For any thread; see `Renderer.prepare`."""
        return self._renderer.prepare(basis, prompt, generate=generate)

    def begin(
        self,
        session_id: str,
        prepared: Prepared,
        params: TurnParams,
        *,
        generate: bool = True,
        version: int | None = None,
        tenant: str = "",
    ) -> Turn | None:
        """As `turn`. `None`, and nothing was done, if the input has to be prepared again: the session has changed."""
        session = self.session(session_id, version, tenant=tenant)
        if Basis.of(session) != prepared.basis:
            return None
        if not generate:
            params = replace(params, max_new_tokens=0)
        params = self._with_stops(params, prepared.conversation)
        return self.engine.submit(session_id, prepared.tokens, params, prepared.conversation, tenant=tenant)

    def begin_one_shot(self, prepared: Prepared, params: TurnParams, policy: Policy) -> Turn:
        """As `one_shot`, of input that was prepared against `opening`."""
        session = self.open(None, replace(policy, ephemeral=True))
        try:
            generate = params.max_new_tokens != 0
            return _begun(self.begin(session.id, prepared, params, generate=generate, tenant=policy.tenant))
        except BaseException:
            self.engine.close(session.id, tenant=policy.tenant)
            raise

    def begin_draft(
        self, session_id: str, prepared: Prepared, version: int | None = None, *, tenant: str = ""
    ) -> Turn | None:
        """As `draft`; see `begin`."""
        if self.basis(session_id, version, tenant=tenant) != prepared.basis:
            return None
        return self.engine.draft(session_id, prepared.tokens, tenant=tenant)

    # -- turns

    def turn(
        self, session_id: str, prompt: Prompt, params: TurnParams, *, generate: bool = True, version: int | None = None
    ) -> Turn:
        """A turn, or without `generate` a prefill-only one."""
        prepared = self.prepare(self.basis(session_id, version), prompt, generate=generate)
        return _begun(self.begin(session_id, prepared, params, generate=generate))

    def one_shot(self, prompt: Prompt, params: TurnParams, policy: Policy) -> Turn:
        """The only turn of an ephemeral session."""
        prepared = self.prepare(self.opening(), prompt, generate=params.max_new_tokens != 0)
        return self.begin_one_shot(prepared, params, policy)

    def regenerate(self, session_id: str, params: TurnParams, version: int | None = None, *, tenant: str = "") -> Turn:
        """See `Engine.regenerate`."""
        session = self.session(session_id, version, tenant=tenant)
        params = self._with_stops(params, session.conversation)
        return self.engine.regenerate(session_id, params, tenant=tenant)

    def draft(self, session_id: str, prompt: Prompt, version: int | None = None) -> Turn:
        """See `Engine.draft`."""
        prepared = self.prepare(self.basis(session_id, version), prompt, generate=False)
        return _begun(self.begin_draft(session_id, prepared))

    def fork(
        self,
        session_id: str,
        *,
        turn: int | None = None,
        position: int | None = None,
        child: str | None = None,
        tenant: str = "",
    ) -> Session:
        """See `Engine.fork`."""
        return self.engine.fork(session_id, turn=turn, position=position, child=child, tenant=tenant)

    def rewind(
        self,
        session_id: str,
        *,
        turn: int | None = None,
        position: int | None = None,
        version: int | None = None,
        tenant: str = "",
    ) -> Session:
        """See `Engine.rewind`."""
        self.session(session_id, version, tenant=tenant)
        return self.engine.rewind(session_id, turn=turn, position=position, tenant=tenant)

    def trim(self, session_id: str, turns: Sequence[int], child: str | None = None, *, tenant: str = "") -> Session:
        """A new session with the turns numbered `turns` (from 1, ascending) of this one. What of them stands at its
        start is shared in memory, the rest is computed when it is wanted. Raises `InvalidRequest`."""
        session = self.session(session_id, tenant=tenant)
        numbers = _ascending(turns, len(session.records))
        check_pick(session, numbers)
        shared = next((n for n, number in enumerate(numbers) if number != n + 1), len(numbers))
        trimmed = self.fork(session_id, turn=shared, child=child, tenant=tenant)
        try:
            for number in numbers[shared:]:
                record = session.records[number - 1]
                tokens, output = (
                    self._renderer.moved_input(session, record, trimmed),
                    session.history[record.input_end : record.end],
                )
                self.engine.adopt(trimmed.id, tokens, output, record.conversation, cut=record.cut, tenant=tenant)
        except BaseException:
            self.engine.close(trimmed.id, tenant=tenant)
            raise
        return trimmed

    def _with_stops(self, params: TurnParams, conversation: Conversation | None) -> TurnParams:
        """In a conversation, what ends an answer ends the turn."""
        if params.ignore_eos:
            return params
        return replace(params, stop_ids=(*params.stop_ids, *self._renderer.stop_ids(conversation)))


def _begun(turn: Turn | None) -> Turn:
    """A turn whose input was prepared against a session that nobody else could change meanwhile."""
    if turn is None:
        raise InvariantError("a session has changed between two operations of its engine's thread")
    return turn


def _ascending(turns: Sequence[int], most: int) -> list[int]:
    numbers = [whole("a turn number", number, 1, most) for number in items("turns", turns, "a list of turn numbers")]
    if any(later <= earlier for earlier, later in pairwise(numbers)):
        raise InvalidRequest(f"turns are {shown(numbers)}; allowed: ascending turn numbers")
    return numbers
