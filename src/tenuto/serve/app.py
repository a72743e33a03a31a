"""The ASGI application: all interfaces on one edge, and the handling that all requests share."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tenuto.base.errors import Disconnected, InvalidRequest, TenutoError
from tenuto.base.heap import give_back
from tenuto.serve import adapters, admin, documents, models, pages
from tenuto.serve import map as map_routes
from tenuto.serve.anthropic import batch_routes as anthropic_batches
from tenuto.serve.anthropic import errors as anthropic_errors
from tenuto.serve.anthropic import routes as anthropic
from tenuto.serve.anthropic.batches import Batches
from tenuto.serve.exchange import Exchange
from tenuto.serve.fleet import routes as fleet_routes
from tenuto.serve.fleet.fleet import Fleet
from tenuto.serve.fleet.forwarding import Forwarding
from tenuto.serve.fleet.receiving import Receiving
from tenuto.serve.llama_cpp import errors as llama_cpp_errors
from tenuto.serve.llama_cpp import routes as llama_cpp_completions
from tenuto.serve.llama_cpp import server as llama_cpp_server
from tenuto.serve.metrics import Metrics
from tenuto.serve.native import session_socket as native_socket
from tenuto.serve.native import sessions as native_sessions
from tenuto.serve.native import tokens as native_tokens
from tenuto.serve.native import turns as native_turns
from tenuto.serve.ollama import embeddings as ollama_embeddings
from tenuto.serve.ollama import errors as ollama_errors
from tenuto.serve.ollama import models as ollama_models
from tenuto.serve.ollama import routes as ollama
from tenuto.serve.openai import conversation_routes as openai_conversations
from tenuto.serve.openai import embeddings as openai_embeddings
from tenuto.serve.openai import invocations as openai_invocations
from tenuto.serve.openai import llama_cpp
from tenuto.serve.openai import realtime_socket as openai_realtime
from tenuto.serve.openai import rerank as openai_rerank
from tenuto.serve.openai import response_inputs as openai_inputs
from tenuto.serve.openai import response_routes as openai_responses
from tenuto.serve.openai import response_socket as openai_sockets
from tenuto.serve.openai import routes as openai
from tenuto.serve.openai import stored_chat_routes as openai_stored_chats
from tenuto.serve.openai import tokens as openai_tokens
from tenuto.serve.openai.found_responses import fate_here
from tenuto.serve.sglang import encode as sglang_encode
from tenuto.serve.sglang import routes as sglang
from tenuto.serve.sglang import server as sglang_server
from tenuto.serve.sglang import weights as sglang_weights
from tenuto.serve.shared.answer_headers import LEFT_UNDONE, VOLATILE, telling
from tenuto.serve.shared.bodies import LARGE, TEXTS
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import (
    BROKEN,
    OPENAI_FORM,
    ErrorForm,
    Failure,
    is_anthropics,
    is_request_id,
    new_request_id,
)
from tenuto.serve.shared.invalid import refusal_of
from tenuto.serve.shared.schemas import REFUSALS

log = structlog.get_logger("tenuto.http")

CLIENT_GONE = 499
"""Status in the log for a request whose client left before the answer."""
UNREADABLE = "the body is not readable JSON: it is not UTF-8, or has a number with too many digits"
TRIM_SECONDS = 1.0
"""Delay between the end of a large request and the return of its memory to the system."""


def build_app(edge: Edge, metrics: Metrics, fleet: Fleet | None = None) -> FastAPI:
    """Builds the ASGI application of an edge. `metrics` counts its turns and requests. `fleet`: that of which it is a
    replica."""
    app = FastAPI(
        title="Tenuto",
        description="An LLM inference server in which the session, not the request, owns model state.",
        version="1",
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages load scripts from other sites
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # otherwise checked on every request
    )
    app.state.edge = edge
    app.state.metrics = metrics
    edge.knows = partial(fate_here, edge)
    edge.resumes[Batches.KIND] = partial(anthropic_batches.resume, edge)
    edge.turns.on_delta.append(metrics.turn_updated)
    edge.turns.on_end.append(metrics.turn_ended)
    for part in (
        native_sessions,
        native_tokens,
        native_turns,
        native_socket,
        sglang,
        sglang_server,
        sglang_weights,
        sglang_encode,
        openai,
        openai_invocations,
        openai_sockets,
        openai_realtime,
        openai_responses,
        openai_inputs,
        openai_conversations,
        openai_embeddings,
        openai_rerank,
        anthropic,
        anthropic_batches,
        openai_tokens,
        llama_cpp,
        openai_stored_chats,  # after the paths of llama.cpp below the same one
        llama_cpp_completions,
        llama_cpp_server,
        ollama,
        ollama_embeddings,
        ollama_models,
        models,
        adapters,
        admin,
        fleet_routes,
        map_routes,
        pages,
        documents,
    ):
        app.include_router(part.router)
    app.get("/models", responses=REFUSALS, tags=["llama.cpp"])(models.list_models)
    app.add_exception_handler(TenutoError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    if fleet is not None:
        app.add_middleware(Forwarding, fleet=fleet, count=metrics.request_forwarded)
    app.add_middleware(Envelope, edge=edge, metrics=metrics)
    app.state.fleet = fleet
    edge.turns.on_moved.append(metrics.turn_moved)
    if fleet is not None:
        fleet.moving.on_move.append(metrics.session_moved)
        app.add_middleware(Receiving, fleet=fleet)
    if edge.settings.allowed_origins:  # answers preflight requests itself, without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=edge.settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return app


_OF_LLAMA_CPP = frozenset(
    getattr(route, "path", "") for part in (llama_cpp, llama_cpp_completions) for route in part.router.routes
)
"""Paths that only llama.cpp has."""


def form_of(path: str) -> ErrorForm:
    """Returns the error form that clients of this path expect."""
    of_anthropic = path.startswith(f"{anthropic.router.prefix}/") or path == anthropic.router.prefix
    if path.startswith(f"{ollama.router.prefix}/"):
        return ollama_errors.FORM
    if path in _OF_LLAMA_CPP:
        return llama_cpp_errors.FORM
    return anthropic_errors.FORM if of_anthropic else OPENAI_FORM


def _form_for(scope: Scope) -> ErrorForm:
    """Returns the error form that the client of this request expects. Several interfaces share the path of models."""
    shared = scope["path"].startswith(f"{models.router.prefix}/") or scope["path"] == models.router.prefix
    return anthropic_errors.FORM if shared and is_anthropics(scope) else form_of(scope["path"])


def failure_response(scope: Scope, failure: Failure) -> Response:
    """Returns the error response to the request of this scope."""
    body = _form_for(scope).body(failure, scope["state"]["request_id"])
    return JSONResponse(body, failure.status, failure.headers)


def _forget_frames(error: BaseException | None) -> None:
    """Drops the tracebacks of an answered error and its causes: their frames would keep the request's body alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, TenutoError)
    if error.status == 500:
        log.error("failed", error=str(error))
    _forget_frames(error)
    return failure_response(request.scope, Failure.of(error))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    refusal = refusal_of(error.errors(), error.body, request.headers.get("content-type"))
    _forget_frames(error)
    return failure_response(request.scope, Failure.of(refusal))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    _forget_frames(error)
    if error.status_code == 400:
        return failure_response(request.scope, Failure(400, InvalidRequest.code, UNREADABLE))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{error.detail}: {request.method} {request.url.path[:200]}; /docs lists the routes"
    response = failure_response(request.scope, Failure(error.status_code, code, message))
    response.headers.update(error.headers or {})
    return response


async def _gone(_: Request, error: Exception) -> Response:
    _forget_frames(error)
    return Response(status_code=CLIENT_GONE)


class Envelope:
    """Gives every request an id, limits on its body, and a log entry. As plain ASGI middleware it adds no cost to the
    events of a stream."""

    def __init__(self, app: ASGIApp, edge: Edge, metrics: Metrics) -> None:
        self._app = app
        self._edge = edge
        self._metrics = metrics
        self._trims = False  # a return of memory is scheduled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, headers = time.perf_counter(), Headers(scope=scope)
        to_disk = scope["path"] == native_sessions.IMPORT_STATE
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        told = [(name.encode(), request_id.encode()) for name in _form_for(scope).id_headers]
        with telling() as own:
            exchange = Exchange(receive, send, told, self._edge, own, to_disk=to_disk)
            await self._handle(scope, headers, exchange, started)

    async def _handle(self, scope: Scope, headers: Headers, exchange: Exchange, started: float) -> None:
        with structlog.contextvars.bound_contextvars(request_id=scope["state"]["request_id"]):
            try:
                await self._answer(scope, headers, exchange)
            except Disconnected:
                raise  # the connection to the replica that answers a client on a WebSocket is broken
            except Exception:
                log.exception("failed")
                if exchange.status:
                    raise  # the answer has begun: all we can do is break the connection
                await exchange.refuse(scope, failure_response(scope, Failure(500, "internal_error", BROKEN)))
            finally:
                if exchange.forget() >= LARGE:
                    self._trim_soon()
                scope.pop("extensions", None)  # they refer back to the request of this scope
                self._log(scope, exchange, time.perf_counter() - started)

    def _trim_soon(self) -> None:
        """Schedules the return of memory, in a thread, for when the objects of large requests are gone. Requests that
        end close together share one return."""
        if self._trims:
            return
        self._trims = True
        loop = asyncio.get_running_loop()

        def trim() -> None:
            self._trims = False
            loop.run_in_executor(None, give_back)

        loop.call_later(TRIM_SECONDS, trim)

    async def _answer(self, scope: Scope, headers: Headers, exchange: Exchange) -> None:
        try:
            exchange.expect(_declared_length(headers))
            if scope["method"] not in ("GET", "HEAD"):
                self._edge.tenant(headers)  # refuses a request without a key before its body is read
            scope[TEXTS] = exchange.texts
            await self._app(scope, exchange.receive, exchange.send)
        except TenutoError as error:
            if exchange.status:
                raise
            _forget_frames(error)
            await exchange.refuse(scope, failure_response(scope, Failure.of(error)))
        else:
            if exchange.excess is not None and not exchange.status:
                await exchange.refuse(scope, failure_response(scope, Failure.of(exchange.excess)))

    def _log(self, scope: Scope, exchange: Exchange, seconds: float) -> None:
        status, method, state = exchange.status or CLIENT_GONE, scope["method"], scope.get("state", {})
        told: dict[str, Any] = {}
        if LEFT_UNDONE in exchange.own:
            told["left_undone"] = exchange.own[LEFT_UNDONE].split(", ")
        if VOLATILE in exchange.own:
            told["volatile_lines"] = int(exchange.own[VOLATILE])
        path = scope["raw_path"].decode("ascii", "backslashreplace")  # without control characters
        ms = round(1000 * seconds, 1)
        log.info("request", method=method, path=path, status=status, ms=ms, tenant=state.get("tenant"), **told)
        self._metrics.request_ended(method, getattr(scope.get("route"), "path", None), status)


def _declared_length(headers: Headers) -> int:
    declared = headers.get("content-length", "0")
    return int(declared) if declared.isdecimal() and len(declared) < 20 else 0


def _request_id(headers: Headers) -> str:
    """Returns the client's own id if it is short, visible ASCII, otherwise a new one."""
    given = headers.get("x-request-id", "")
    return given if is_request_id(given) else new_request_id()
