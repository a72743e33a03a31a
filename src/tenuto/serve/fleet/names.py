"""The sessions that a request names, in its path or its body."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.types import Scope

_IMPORT = ("/v1/sessions/import", "/v1/sessions/import/state")
_IN_PATH = re.compile(r"/v1/(?:sessions/([^/]+)|responses/(resp_[^/]+))(?:/.*)?", re.DOTALL)
_THREAD = re.compile(r"(msg_[0-9a-f]{32})_[0-9]+")


class Named(msgspec.Struct):
    """The fields of a body that name sessions, in all interfaces."""

    id: Any = None
    session_id: Any = None
    previous_response_id: Any = None
    session_params: Any = None
    thread: Any = None


def _session_id(body: Named) -> Iterator[Any]:
    yield body.session_id


def _id(body: Named) -> Iterator[Any]:
    yield body.id


def _previous(body: Named) -> Iterator[Any]:
    yield body.previous_response_id


def _session_params(body: Named) -> Iterator[Any]:
    given = body.session_params if isinstance(body.session_params, list) else [body.session_params]
    for params in given:
        yield params.get("id") if isinstance(params, dict) else None


def _thread(body: Named) -> Iterator[Any]:
    message = body.thread.get("previous_message_id") if isinstance(body.thread, dict) else None
    found = _THREAD.fullmatch(message) if isinstance(message, str) else None
    yield found[1] if found is not None else None


_IN_BODY: Mapping[str, Callable[[Named], Iterable[Any]]] = {
    "/v1/chat/completions": _session_id,
    "/v1/completions": _session_id,
    "/invocations": _session_id,
    "/open_session": _session_id,
    "/close_session": _session_id,
    "/generate": _session_params,
    "/v1/responses": _previous,
    "/v1/responses/compact": _previous,
    "/v1/responses/input_tokens": _previous,
    "/v1/messages": _thread,
}
"""The sessions in the body of a request, by its path."""
_OPENS = re.compile(r"/v1/sessions(?:/import|/[^/]+/(?:fork|trim))?")
"""The paths of requests whose bodies name a session to open."""


_STARTS = re.compile(
    r"/v1/(?:embeddings|rerank|moderations)|/api/(?:chat|generate|embed|embeddings)|/(?:completions?|embeddings?|rerank)"
)
"""Other paths of requests that start turns without a session."""


def is_new(scope: Scope) -> bool:
    """Whether a request that names no session opens one, or starts a turn without one, so that any replica can answer
    it."""
    path = scope["path"]
    starts = path in _IN_BODY or path in _IMPORT or _OPENS.fullmatch(path) or _STARTS.fullmatch(path)
    return scope["method"] == "POST" and bool(starts)


def in_path(scope: Scope) -> tuple[list[str], list[str]]:
    """Returns the sessions that a request uses by its path, and those that it would open by its query."""
    if scope["path"] in _IMPORT:
        return [], _texts(parse_qs(scope["query_string"].decode("latin-1")).get("id", ()))
    found = _IN_PATH.fullmatch(scope["path"])
    return [found[1] or found[2]] if found is not None else [], []


def is_in_body(scope: Scope) -> bool:
    """Whether the body of a request may name sessions."""
    return scope["method"] in ("POST", "PUT") and (
        scope["path"] in _IN_BODY or _OPENS.fullmatch(scope["path"]) is not None
    )


def in_body(path: str, body: bytes) -> tuple[list[str], list[str]]:
    """Returns the sessions that the request with this path and body uses, and those that it would open. A body that
    cannot be read names none: it will be refused."""
    try:
        read = msgspec.json.decode(body, type=Named)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [], []
    if path in _IN_BODY:
        return _texts(_IN_BODY[path](read)), []
    return [], _texts(_id(read))


def _texts(given: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(name for name in given if isinstance(name, str) and name))
