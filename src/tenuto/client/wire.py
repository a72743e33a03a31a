"""Translates requests to the native HTTP interface, and its answers back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from operator import index
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex, TypeVar
from urllib.parse import quote

import msgspec

from tenuto.base.checks import MAX_COUNT, whole
from tenuto.base.errors import InvalidRequest, NotFound, TenutoError
from tenuto.base.options import OF_PREFILL, OF_SAMPLING, TOOL_OPTIONS, TurnParams
from tenuto.base.tokens import PackedTokens, SessionTokens
from tenuto.base.tools.grammar import Grammar
from tenuto.base.tools.tool_use import ToolUse
from tenuto.base.turns import Message, TurnInput, TurnKind
from tenuto.base.views import Record, RecordPage, SessionInfo, SessionPage
from tenuto.base.wire import messages
from tenuto.base.wire.bodies import read_body
from tenuto.base.wire.replies import Refusal, error_of
from tenuto.base.wire.request import Request, answer_of
from tenuto.base.wire.trainer_messages import Pause, ReleaseMemory, Resume, ResumeMemory, UpdateWeights
from tenuto.client.transport import Options

T = TypeVar("T")

SERVER_OPTIONS = frozenset({"if_busy", "if_version", "on_disconnect"})
"""The options in `RemoteOptions` that are not in `TurnOptions`."""


class Exchange(NamedTuple):
    """An HTTP request."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    query: dict[str, Any] | None = None


def exchange_of(request: Request[Any]) -> Exchange:
    """Translates a client's request to HTTP. Raises `NotFound` if its session id cannot exist."""
    return _EXCHANGES[type(request)](request)


def _of_session(method: str, request: Any, action: str = "", body: Any = None, **query: Any) -> Exchange:
    return Exchange(method, session_path(request.session) + action, body, query)


def _opening(request: messages.OpenSession) -> dict[str, Any]:
    policy = request.policy
    own = {name: getattr(policy, name) for name in ("ttl", "priority", "max_tokens", "pinned")}
    adapter = policy.adapter.name if policy.adapter is not None else None
    return {"id": request.session, "system": request.system, "adapter": adapter, **own}


def _place(request: messages.Fork | messages.Rewind) -> dict[str, int | None]:
    return {"turn": request.turn, "position": request.position}


_EXCHANGES: dict[type, Callable[[Any], Exchange]] = {
    messages.Describe: lambda _: Exchange("GET", "/v1/engine"),
    messages.Audit: lambda _: Exchange("GET", "/audit"),
    messages.OpenSession: lambda r: Exchange("POST", "/v1/sessions", _opening(r)),
    messages.ListSessions: lambda r: Exchange("GET", "/v1/sessions", query={"limit": r.limit, "after": r.after}),
    messages.GetSession: lambda r: _of_session("GET", r),
    messages.ExportSession: lambda r: _of_session("GET", r, "/export"),
    messages.ImportSession: lambda r: Exchange(
        "POST", "/v1/sessions/import", msgspec.to_builtins(r.document), {"id": r.session}
    ),
    messages.ListTurns: lambda r: _of_session("GET", r, "/turns", first=r.first, limit=r.limit),
    messages.GetTokens: lambda r: _of_session("GET", r, "/tokens"),
    messages.Draft: lambda r: _of_session("PUT", r, "/draft", {"input": input_body(r.input)}),
    messages.AbortTurn: lambda r: _of_session("POST", r, "/abort", {}),  # without a turn_id: the open turn
    messages.Detokenize: lambda r: Exchange("POST", "/detokenize", {"tokens": r.tokens}),
    messages.Fork: lambda r: _of_session("POST", r, "/fork", {**_place(r), "id": r.child}),
    messages.Trim: lambda r: _of_session("POST", r, "/trim", {"turns": r.turns, "id": r.child}),
    messages.Rewind: lambda r: _of_session("POST", r, "/rewind", _place(r)),
    messages.Expect: lambda r: _of_session("POST", r, "/expect", {"within": r.within}),
    Pause: lambda r: Exchange("POST", "/pause_generation", {"mode": "retract" if r.release else "in_place"}),
    Resume: lambda _: Exchange("POST", "/continue_generation"),
    ReleaseMemory: lambda r: Exchange("POST", "/release_memory_occupation", {"tags": r.parts}),
    ResumeMemory: lambda r: Exchange("POST", "/resume_memory_occupation", {"tags": r.parts}),
    UpdateWeights: lambda r: Exchange(
        "POST",
        "/update_weights_from_disk",
        {
            "model_path": r.path,
            "weight_version": r.use.version,
            "abort_all_requests": r.use.abort,
            "keep_state": r.use.keep_state,
        },
    ),
    messages.EraseSession: lambda r: _of_session("DELETE", r, erase="true"),
    messages.CloseSession: lambda r: _of_session("DELETE", r, finish="true" if r.finish else "false"),
}


def answer_from(request: Request[T], body: Any) -> T:
    """Converts the JSON answer to `request`. Raises `TenutoError` if it has another form."""
    kind = answer_of(type(request))
    with valid_answer():
        answer: T = msgspec.convert(_answer(kind, body), kind)
        return answer


@contextmanager
def valid_answer() -> Iterator[None]:
    """Turns errors of converting a server's JSON into `TenutoError`."""
    try:
        yield
    except (msgspec.ValidationError, LookupError, TypeError) as error:
        raise TenutoError(f"the server's answer is not valid: {error!r}; is this a Tenuto server?") from error


def _answer(kind: type, body: Any) -> Any:
    """Rearranges a JSON answer to the fields of `kind`."""
    if kind is SessionInfo:
        return read_body(SessionInfo, body)
    if kind is SessionPage:
        sessions = [read_body(SessionInfo, view) for view in body["data"]]
        return SessionPage(sessions=sessions, more=body["next"] is not None)
    if kind is RecordPage:
        return RecordPage(records=msgspec.convert(body["data"], list[Record]), more=body["next"] is not None)
    if kind is PackedTokens:
        return msgspec.convert(body, SessionTokens).packed()
    if kind is str:  # the only one of them is a text of tokens
        return body["text"]
    return {bool: True, type(None): None}.get(kind, body)


def session_path(session_id: str) -> str:
    """Returns the path of a session. Raises `NotFound` for ids that no session can have."""
    if session_id in ("", ".", ".."):  # these change the path of a URL
        raise NotFound(f"there is no session {session_id!r}")
    return f"/v1/sessions/{quote(session_id, safe='')}"


def version_in(options: Options) -> int | None:
    """Returns the version that a request's session must have, if one is given. Raises `InvalidRequest`."""
    expected = options.get("if_version")
    return whole("if_version", expected, 0, MAX_COUNT) if expected is not None else None


def if_match(version: int | None) -> dict[str, str]:
    """Returns the headers of a request whose session must have this version."""
    return {} if version is None else {"if-match": f'"{version}"'}


def encode(body: Any) -> bytes:
    """Encodes a body as JSON. Raises `InvalidRequest`."""
    try:
        return msgspec.json.encode(body, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None


def _plain(value: object) -> int | float:
    """Converts numbers that JSON encoding does not know, such as NumPy's."""
    if isinstance(value, SupportsIndex):
        return index(value)
    if isinstance(value, SupportsFloat):
        return float(value)
    raise TypeError(f"there is a {type(value).__name__} in it")


def input_body(given: TurnInput) -> str | list[Any]:
    """Returns a turn's input as JSON values."""
    if isinstance(given, str):
        return given
    return [_message(one) if isinstance(one, Message) else one for one in given]


def _message(message: Message) -> dict[str, Any]:
    """Returns a message as a JSON object, without empty fields other than `content`."""
    body = {name: value for name, value in asdict(message).items() if value}
    return {"role": message.role, "content": message.content, **body}


def turn_body(kind: TurnKind, params: TurnParams, options: Options) -> dict[str, Any]:
    """Returns the given options that apply to this kind of turn, as a JSON body."""
    body: dict[str, Any] = {}
    for name in options.keys() - TOOL_OPTIONS - {"if_version"}:  # a header
        if name in SERVER_OPTIONS:
            value: Any = options[name]
        else:
            value = getattr(params.sampling if name in OF_SAMPLING else params, name)
        if isinstance(value, Grammar):
            value = value.given()
        if value is not None and (kind != "append" or name in (*OF_PREFILL, "if_busy")):
            body[name] = dict(value) if name == "logit_bias" else value
    return body


def tools_body(kind: TurnKind, use: ToolUse) -> dict[str, Any]:
    """Returns the fields of a turn's JSON body that describe its tools."""
    body: dict[str, Any] = {"tools": list(use.functions)}
    if kind != "append":
        body["tool_choice"] = {"name": use.only} if use.only else use.choice
        body["parallel_tool_calls"] = use.parallel
    return body


def error_from(status: int, content: bytes) -> TenutoError:
    """Converts the JSON of an error answer or event to the error class that its code names, or to `TenutoError`."""
    try:
        refused = msgspec.json.decode(content, type=_Refused).error
    except msgspec.DecodeError:
        return TenutoError(f"the server answered with status {status} and no reason; is this a Tenuto server?")
    return error_of(Refusal(call=0, code=str(refused.code), message=refused.message, param=refused.param))


class _Said(msgspec.Struct):
    message: str
    code: str | int | None = None
    param: str | None = None


class _Refused(msgspec.Struct):
    error: _Said
