"""Traces of turns by OpenTelemetry. This module needs the extra `otel`, so it is imported only if traces are asked for.

Source of the attributes `gen_ai.*`: the semantic conventions for generative AI, at
opentelemetry.io/docs/specs/semconv/gen-ai. The attributes `tenuto.*` are our own. None has any text of a conversation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import entry_points, version

from fastapi import FastAPI
from opentelemetry import context, propagate
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tenuto.base.errors import ConfigError
from tenuto.base.turns import EndReason, TurnResult, last_role
from tenuto.base.wire.messages import StartTurn
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.live_turn import LiveTurn

EXPORTERS = "opentelemetry_traces_exporter"
"""The group of entry points in which packages register exporters."""
LAST_SECONDS = 3.0
"""Time for the last spans when the server ends."""


class Tracing:
    """Makes a span of every turn that goes to the engine."""

    def __init__(self, exporters: Sequence[SpanExporter]) -> None:
        own = {"service.name": "tenuto", "service.version": version("tenuto")}
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for exporter in exporters:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tenuto", version("tenuto"))

    @classmethod
    def to(cls, names: Sequence[str]) -> Tracing:
        """Traces to the exporters that are registered under these names. Raises `ConfigError`."""
        found = {each.name: each for each in entry_points(group=EXPORTERS)}
        if missing := [name for name in names if name not in found]:
            raise ConfigError(
                f"there is no exporter {missing[0]!r} of traces; installed: {', '.join(sorted(found)) or 'none'}"
            )
        return cls([found[name].load()() for name in names])

    def attach(self, app: FastAPI, edge: Edge) -> None:
        """Traces the turns of an edge, in the traces that its requests belong to."""
        app.add_middleware(TraceContext)
        edge.turns.on_start.append(partial(self._started, edge))

    def close(self) -> None:
        """Sends the last spans, for at most `LAST_SECONDS`: the SDK itself waits longer for a receiver that is gone."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(LAST_SECONDS)

    def _started(self, edge: Edge, turn: LiveTurn) -> None:
        model, operation = edge.name_of(turn.request.adapter), operation_of(turn.request)
        known = {"gen_ai.operation.name": operation, "gen_ai.request.model": model, **dict(_asked(turn.request))}
        began = time.time_ns() - round(1e9 * (time.perf_counter() - turn.requested_at))
        span = self._tracer.start_span(f"{operation} {model}", kind=SpanKind.SERVER, attributes=known, start_time=began)
        if span.is_recording():
            turn.listeners.append(partial(_heard, turn, span, model))


class TraceContext:
    """Middleware that reads the trace context of a request (W3C's `traceparent`, or what `OTEL_PROPAGATORS` names), in
    which the spans of its turns are made."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # messages of WebSockets come again as requests, with the socket's headers
            await self._app(scope, receive, send)
            return
        token = context.attach(propagate.extract(Headers(scope=scope)))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


def operation_of(request: StartTurn) -> str:
    """Returns the kind of a turn, in the words of the conventions where they have one."""
    if request.params.pooling is not None:
        return "embeddings"
    if request.kind == "append":
        return "append"
    return "chat" if request.kind == "regenerate" or last_role(request.input) else "text_completion"


def _asked(request: StartTurn) -> Iterator[tuple[str, AttributeValue]]:
    """Returns what is known of a turn when it starts."""
    yield "gen_ai.provider.name", "tenuto"
    yield "tenuto.tenant", request.tenant
    if request.session is not None:
        yield "gen_ai.conversation.id", request.session
    if request.kind == "append":
        return
    sampling = request.params.sampling
    if request.params.max_new_tokens is not None:
        yield "gen_ai.request.max_tokens", request.params.max_new_tokens
    yield "gen_ai.request.temperature", sampling.temperature
    if not sampling.greedy:
        yield "gen_ai.request.top_p", sampling.top_p
        yield "gen_ai.request.top_k", sampling.top_k
        yield "gen_ai.request.seed", sampling.seed
    if sampling.presence_penalty or sampling.frequency_penalty:
        yield "gen_ai.request.presence_penalty", sampling.presence_penalty
        yield "gen_ai.request.frequency_penalty", sampling.frequency_penalty


def _heard(turn: LiveTurn, span: Span, model: str) -> None:
    """Ends the span of a turn that has ended."""
    if not turn.ended:
        return
    span.set_attribute("gen_ai.response.id", turn.id)
    span.set_attribute("gen_ai.response.model", model)
    if turn.result is not None:
        span.set_attributes(dict(_done(turn, turn.result)))
    if turn.error is not None:
        _failed(span, turn.error.code)
    elif turn.result is not None and turn.result.reason is EndReason.FAILED:
        _failed(span, turn.result.reason.value)
    span.end()


def _failed(span: Span, code: str) -> None:
    span.set_attribute("error.type", code)
    span.set_status(StatusCode.ERROR)


def _done(turn: LiveTurn, result: TurnResult) -> Iterator[tuple[str, AttributeValue]]:
    """Returns what a turn's end tells."""
    usage = result.usage
    yield "gen_ai.response.finish_reasons", (result.reason.value,)
    yield "gen_ai.usage.input_tokens", usage.prompt
    yield "gen_ai.usage.cache_read.input_tokens", usage.cached
    yield "gen_ai.usage.output_tokens", usage.generated
    yield "tenuto.usage.computed_tokens", usage.computed
    yield "tenuto.turn.committed", result.committed
    yield "tenuto.session.version", result.version
    if turn.waited is not None:
        yield "tenuto.turn.queue_time", turn.waited
    if turn.first_at is not None:
        yield "gen_ai.response.time_to_first_chunk", turn.first_at - turn.requested_at
