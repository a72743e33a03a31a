"""Spans of turns, as a receiver of OpenTelemetry's protocol gets them from a real server."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tenuto.base.errors import ConfigError
from tenuto.base.options import TurnParams
from tenuto.base.turns import Message
from tenuto.base.wire.messages import StartTurn
from tests.eventually import eventually
from tests.serve.server import Server, serving
from tests.serve.test_native import turn

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
tracing = pytest.importorskip("tenuto.serve.tracing")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "blackbird"


class Receiver(ThreadingHTTPServer):
    """Receives spans by OTLP over HTTP. `refuses`: answers that it cannot take any now."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.refuses = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def requests(self) -> list[Any]:
        return [trace_service.ExportTraceServiceRequest.FromString(body) for body in self.bodies]

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if not self.server.refuses:
            self.server.bodies.append(body)
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.send_response(503 if self.server.refuses else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            thread.join()


def configured(receiver: Receiver, **more: str) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "50", **more}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced(receiver: Receiver) -> Iterator[Server]:
    with serving("--model", "witness", "--context-length", "512", env=configured(receiver)) as server:
        yield server
        server.audit()


def known(span: Any) -> dict[str, Any]:
    """Returns a span's attributes."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def span_of(receiver: Receiver, session: str) -> Any:
    """Returns the only span of a session's turns, when it has arrived."""

    def found() -> list[Any]:
        return [span for span in receiver.spans if known(span).get("gen_ai.conversation.id") == session]

    eventually(lambda: bool(found()))
    (span,) = found()
    return span


def test_a_turn_is_a_span_in_the_trace_of_its_request(traced: Server, receiver: Receiver) -> None:
    with traced.client(headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}) as http:
        http.post("/v1/sessions", json={"id": "first"})
        ended = turn(http, "/v1/sessions/first", input=[1] * 30, max_new_tokens=5, temperature=0.5, seed=7)
    span = span_of(receiver, "first")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (span.name, span.kind) == ("text_completion witness", 2)  # 2: a server's
    attributes = known(span)
    assert [value.string_value for value in attributes.pop("gen_ai.response.finish_reasons").values] == ["length"]
    first, queued = attributes.pop("gen_ai.response.time_to_first_chunk"), attributes.pop("tenuto.turn.queue_time")
    assert (
        0 <= ended["queued_seconds"] <= queued <= first <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    )
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tenuto",
        "gen_ai.conversation.id": "first",
        "gen_ai.request.model": "witness",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": ended["id"],
        "gen_ai.response.model": "witness",
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 5,
        "tenuto.tenant": "default",
        "tenuto.turn.committed": True,
        "tenuto.session.version": 1,
        "tenuto.usage.computed_tokens": ended["usage"]["computed_tokens"],
    }


def test_cached_tokens_of_a_later_turn_are_counted(traced: Server, receiver: Receiver) -> None:
    with traced.client() as http:
        http.post("/v1/sessions", json={"id": "later"})
        turn(http, "/v1/sessions/later", input=[2] * 30, max_new_tokens=1)
        turn(http, "/v1/sessions/later", input=[3] * 10, max_new_tokens=1)
    eventually(lambda: len([s for s in receiver.spans if known(s).get("gen_ai.conversation.id") == "later"]) == 2)
    spans = [span for span in receiver.spans if known(span).get("gen_ai.conversation.id") == "later"]
    assert [known(span)["gen_ai.usage.cache_read.input_tokens"] for span in spans] == [0, 30]
    assert all(len(span.trace_id) == 16 and not span.parent_span_id for span in spans)  # each begins a new trace


def test_a_turn_that_the_engine_refuses_is_an_error_without_usage(traced: Server, receiver: Receiver) -> None:
    with traced.client() as http:
        http.post("/v1/sessions", json={"id": "refused"})
        assert http.post("/v1/sessions/refused/turns", json={"input": [1] * 600}).status_code == 400
    span = span_of(receiver, "refused")
    assert (known(span)["error.type"], span.status.code) == ("context_exceeded", 2)
    assert "gen_ai.usage.input_tokens" not in known(span)
    assert not span.status.message


def test_a_request_whose_caller_did_not_sample_its_trace_is_not_traced(traced: Server, receiver: Receiver) -> None:
    with traced.client(headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}) as http:
        http.post("/v1/sessions", json={"id": "unsampled"})
        turn(http, "/v1/sessions/unsampled", input=[1], max_new_tokens=1)
    with traced.client() as http:
        http.post("/v1/sessions", json={"id": "sampled"})
        turn(http, "/v1/sessions/sampled", input=[1], max_new_tokens=1)
    span_of(receiver, "sampled")
    assert "unsampled" not in {known(span).get("gen_ai.conversation.id") for span in receiver.spans}


def test_spans_are_in_the_trace_of_a_websocket_s_handshake(traced: Server, receiver: Receiver) -> None:
    from websockets.sync.client import connect  # noqa: PLC0415 - only here

    with traced.client() as http:
        http.post("/v1/sessions", json={"id": "socket"})
    url = f"{traced.url.replace('http', 'ws')}/v1/sessions/socket/socket"
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with connect(url, additional_headers=headers) as socket:
        socket.send('{"type": "turn", "input": [1, 2], "max_new_tokens": 1}')
        while "committed" not in socket.recv(timeout=60):
            pass
    assert span_of(receiver, "socket").trace_id.hex() == TRACE


def test_no_text_is_in_a_span_and_a_chat_is_called_one(smollm2_path: Path) -> None:
    with receiving() as receiver:
        more = {"OTEL_SERVICE_NAME": "chats", "OTEL_EXPORTER_OTLP_HEADERS": "x-team=blue"}
        with serving(
            "--model", str(smollm2_path), "--context-length", "256", env=configured(receiver, **more)
        ) as server:
            with server.client() as http:
                body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 8, "stop": [SECRET]}
                http.post("/v1/chat/completions", json={"model": "default", **body}).raise_for_status()
            assert server.stop() == 0  # which sends the last spans
        (span,) = receiver.spans
        assert span.name.startswith("chat ")
        assert SECRET.encode() not in b"".join(receiver.bodies)
        resource = {
            each.key: each.value.string_value for each in receiver.requests[0].resource_spans[0].resource.attributes
        }
        assert resource["service.name"] == "chats"
        assert {headers["x-team"] for headers in receiver.headers} == {"blue"}


def test_a_server_ends_in_time_although_no_receiver_takes_its_spans() -> None:
    with receiving() as receiver:
        receiver.refuses = True
        with serving("--model", "witness", env=configured(receiver)) as server:
            with server.client() as http:
                http.post("/v1/sessions", json={"id": "lost"})
                turn(http, "/v1/sessions/lost", input=[1], max_new_tokens=1)
            assert server.stop() == 0
        assert receiver.bodies == []


def loads_protobuf(server: Server) -> bool:
    """Whether the process has loaded the library of protobuf, which the SDK's exporter needs."""
    return "google/_upb" in Path(f"/proc/{server.process.pid}/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux shows what a process has loaded")
def test_a_server_without_the_variables_does_not_load_the_sdk(witness: Server, traced: Server) -> None:
    assert loads_protobuf(traced)
    assert not loads_protobuf(witness)


def test_an_exporter_that_is_not_there_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="there is no exporter 'pigeon' of traces; installed: console, "):
        tracing.Tracing.to(["pigeon"])
    with pytest.raises(RuntimeError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'x'; allowed: http/protobuf, grpc"):
        Server("--model", "witness", env={"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "x"})


@pytest.mark.parametrize(
    ("request_", "operation"),
    [
        (StartTurn(kind="turn", tenant="", input=[Message("user", "x")]), "chat"),
        (StartTurn(kind="regenerate", tenant=""), "chat"),
        (StartTurn(kind="turn", tenant="", input="x"), "text_completion"),
        (StartTurn(kind="append", tenant="", input=[Message("user", "x")]), "append"),
        (StartTurn(kind="turn", tenant="", input=[1], params=TurnParams(pooling="last")), "embeddings"),
    ],
)
def test_operations_have_the_names_of_the_conventions(request_: StartTurn, operation: str) -> None:
    assert tracing.operation_of(request_) == operation
