"""Threads: conversations that the server keeps. A thread is a session. The id of each of its messages has the session's
name, and its version after the message. So a message can be continued once, also after a restart."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends
from pydantic import Field

from tenuto.base.checks import shown
from tenuto.base.errors import InvalidRequest, NotFound, SessionBusy, SessionClosed, TenutoError, VersionMismatch
from tenuto.base.tools.definitions import NO_TOOLS, Tools
from tenuto.base.views import SessionInfo
from tenuto.base.wire.messages import GetSession, StartTurn
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf, open_message
from tenuto.serve.shared.kept import MAX_BYTES, MAX_KEPT, Kept
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.objects import ForeignObject
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.tenant_objects import TenantObjects

TOOLS = "tools"
"""Key in the metadata of a thread's session: a digest of its tools."""
_MESSAGE_ID = re.compile(r"(msg_[0-9a-f]{32})_([1-9][0-9]{0,8})")
_AGAIN = 'send all messages with thread {"type": "create"}'


class ThreadRefused(TenutoError, code="invalid_request", status=400):
    """A thread cannot do what the request asks. `error_code` and `more`: details for Anthropic's clients, which then
    send all messages."""

    def __init__(self, error_code: str, message: str, **more: Any) -> None:
        super().__init__(message, param="thread", details={"error_code": error_code, **more})


class ThreadNotFound(ThreadRefused, code="not_found", status=404):
    """No message of a thread has this id."""

    def __init__(self, message_id: str, reason: str = "it is not of a thread, or the thread has ended") -> None:
        said = f"message {message_id[:80]!r} cannot be continued: {reason}; {_AGAIN}"
        super().__init__("thread_not_found", said)


class KeptTools:
    """The tools of a tenant's latest threads, by their digests. Requests that continue a thread do not repeat them. In
    a fleet, replicas find those that others have kept."""

    KIND = "tools"

    def __init__(self, objects: TenantObjects | None) -> None:
        """`objects`: those of the fleet, if there is one."""
        self._kept = Kept()
        self._objects = objects

    async def keep(self, tools: Tools) -> None:
        """Keeps tools."""
        known, source = self._kept.find(tools.digest) is not None, tools.source.encode()
        self._kept.keep(tools.digest, source)
        if self._objects is not None and not known and len(source) <= MAX_BYTES:
            await self._objects.create(tools.digest, b"", source)
            await self._objects.drop_oldest(MAX_KEPT, MAX_BYTES)

    async def find(self, digest: str) -> Tools | None:
        """Returns the tools with this digest; `None` if they are not kept."""
        source = self._kept.find(digest)
        if source is None and self._objects is not None:
            source = await self._objects.only_item(digest)
        return Tools(source.decode()) if source is not None else None


def kept_tools(edge: Edge, tenant: Tenant) -> KeptTools:
    """Returns those of a tenant."""
    objects = edge.objects(tenant, KeptTools.KIND) if edge.in_fleet else None
    return edge.part(KeptTools, objects, tenant=tenant.name)


async def _kept(edge: EdgeOf, tenant: Caller) -> KeptTools:
    return kept_tools(edge, tenant)


ThreadTools = Annotated[KeptTools, Depends(_kept)]


class ThreadField(ForeignObject):
    """The field `thread` of a request."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = Field(None, max_length=256, description="The message to continue.")

    def continued(self) -> str | None:
        """Returns the id of the message to continue, or `None` for a new thread. Raises `InvalidRequest`."""
        if (self.type == "continue") != (self.previous_message_id is not None):
            raise InvalidRequest(
                f"thread.previous_message_id is {shown(self.previous_message_id)} and thread.type {self.type}; "
                "allowed: an id with type continue, none with create",
                param="thread.previous_message_id",
            )
        return self.previous_message_id


@dataclass(frozen=True, slots=True)
class Thread:
    """The place in a thread at which a request continues it. `session`: name of its session. `version`: that of the
    session, 0 for a new thread. `tools`: those that the thread was created with. `message_id`: the message to
    continue, empty for a new thread."""

    session: str
    version: int = 0
    tools: Tools = NO_TOOLS
    message_id: str = ""

    @property
    def next_id(self) -> str:
        """Id of the message that the request will be answered with."""
        return f"{self.session}_{self.version + 1}"

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Replaces errors raised inside the block by those that Anthropic's clients expect of threads."""
        try:
            yield
        except (NotFound, SessionClosed):
            raise ThreadNotFound(self.message_id) from None
        except SessionBusy:
            said = f"another request is continuing message {self.message_id}; wait for its answer, or {_AGAIN}"
            raise ThreadRefused("thread_continue_in_flight", said) from None
        except VersionMismatch:
            said = f"message {self.message_id} has been continued already; continue the thread's last one, or {_AGAIN}"
            raise ThreadRefused("thread_already_continued", said) from None

    def require_open(self, state: SessionInfo) -> None:
        """Raises an error unless the session's present state is that after the message to continue."""
        if state.version < self.version:
            raise NotFound
        if state.version > self.version:
            raise VersionMismatch
        if state.turn is not None:
            raise SessionBusy


def session_of(message_id: str | None) -> str | None:
    """Returns the session of the thread that has this message; `None` if it is of no thread."""
    found = _MESSAGE_ID.fullmatch(message_id) if message_id is not None else None
    return found[1] if found is not None else None


async def find(edge: Edge, tenant: Tenant, message_id: str, kept: KeptTools) -> Thread:
    """Returns the place after this message. Raises `ThreadRefused`."""
    found = _MESSAGE_ID.fullmatch(message_id)
    if found is None:
        raise ThreadNotFound(message_id)
    thread = Thread(found[1], int(found[2]), message_id=message_id)
    with thread.naming():
        state = await edge.link.call(GetSession(tenant=tenant.name, session=thread.session))
        thread.require_open(state)
    digest = state.metadata.get(TOOLS)
    if digest is None:
        return thread
    tools = await kept.find(digest)
    if tools is None:
        raise ThreadNotFound(message_id, "the server has not kept the thread's tools")
    return Thread(thread.session, thread.version, tools, message_id)


async def new_thread(tools: Tools, kept: KeptTools) -> Thread:
    """Returns a new thread with these tools. Its session is not open yet."""
    if tools:
        await kept.keep(tools)
    return Thread(f"msg_{secrets.token_hex(16)}", tools=tools)


async def start_turn(edge: Edge, tenant: Tenant, thread: Thread, start: StartTurn) -> LiveTurn:
    """Starts the thread's next turn with the options of `start`, and returns it once the engine has accepted it. Raises
    `ThreadRefused`."""
    start = msgspec.structs.replace(start, session=thread.session, version=thread.version)
    try:
        if thread.version == 0:
            told = ((TOOLS, thread.tools.digest),) if thread.tools else ()
            ttl = edge.settings.ttl(None, named=False)
            await edge.link.call(open_message(tenant, thread.session, ttl=ttl, adapter=start.adapter, metadata=told))
        with thread.naming():
            return await edge.start(tenant, start)
    except BaseException:
        end_turn(edge, tenant, thread, None)
        raise


def end_turn(edge: Edge, tenant: Tenant, thread: Thread, turn: LiveTurn | None) -> None:
    """Called at the end of an answer, or when its turn has not started. Closes the session of a new thread unless its
    first turn has committed, which also aborts the turn."""
    if thread.version == 0 and (turn is None or not turn.committed):
        edge.spawn(edge.turns.close_if_open((tenant.name, thread.session)))
