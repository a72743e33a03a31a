"""The application: all interfaces over one edge, and what happens to every request."""

from __future__ import annotations

import json
import re
import secrets
import time
from contextlib import suppress
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tenuto.base.errors import InvalidRequest, TenutoError, TooLarge
from tenuto.serve import admin, native, openai, sglang
from tenuto.serve.edge import Edge, Failure

log = structlog.get_logger("tenuto.http")

CLIENT_GONE = 499
"""The status under which a request is logged whose client did not wait for the answer."""
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def build_app(edge: Edge) -> FastAPI:
    """The ASGI application of an edge."""
    app = FastAPI(
        title="Tenuto",
        description="An LLM inference server in which the session, not the request, owns model state.",
        version="1",
        redirect_slashes=False,
    )
    app.state.edge = edge
    for router in (native.router, sglang.router, openai.router, admin.router):
        app.include_router(router)
    app.add_exception_handler(TenutoError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _broken)
    app.add_middleware(Envelope, edge=edge)
    return app


def failure_response(failure: Failure) -> Response:
    """An error as an answer."""
    return JSONResponse(failure.body, failure.status, failure.headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, TenutoError)
    return failure_response(Failure.of(error))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = []
    for problem in error.errors()[:8]:
        place = ".".join(str(part) for part in problem["loc"] if part != "body")
        problems.append(f"{place}: {problem['msg']}" if place else str(problem["msg"]))
    return failure_response(Failure(InvalidRequest.status, InvalidRequest.code, "; ".join(problems)))


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    response = failure_response(Failure(error.status_code, code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _gone(_: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _broken(_: Request, error: Exception) -> Response:
    log.error("failed", exc_info=error)
    return failure_response(Failure(500, "internal_error", "the server failed; its log says why"))


class Envelope:
    """Around every request: an id, a limit on the body, a line in the log. Plain ASGI: it costs nothing an event."""

    def __init__(self, app: ASGIApp, edge: Edge) -> None:
        self._app = app
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, received = time.perf_counter(), 0, 0
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        most = self._edge.settings.max_body_bytes
        too_large = TooLarge(f"the body has more than {most} bytes, the most allowed")

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise too_large
            return message

        async def labelled(message: Message) -> None:
            nonlocal status
            if received > most and not status:
                return  # whatever the application makes of the error, it is answered below
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                received = _declared_length(headers)
                if received <= most:
                    received = 0
                    with suppress(TooLarge):
                        await self._app(scope, limited, labelled)
                if received > most and not status:
                    received = 0
                    await failure_response(Failure.of(too_large))(scope, receive, labelled)
            finally:
                milliseconds = round(1000 * (time.perf_counter() - started), 1)
                state: dict[str, Any] = scope.get("state", {})
                path, method = scope["path"], scope["method"]
                log.info(
                    "request", method=method, path=path, status=status, ms=milliseconds, tenant=state.get("tenant")
                )


def _declared_length(headers: dict[bytes, bytes]) -> int:
    declared = headers.get(b"content-length", b"0")
    return int(declared) if declared.isdigit() else 0


def _request_id(headers: dict[bytes, bytes]) -> str:
    """The client's own, if it is a plain one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


def openapi_document(app: FastAPI) -> str:
    """The OpenAPI description, as JSON."""
    return json.dumps(app.openapi(), indent=2)
