"""The server's processes: how they end, and that nothing remains of them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvloop

from tenuto.base.config import WorkerSettings
from tenuto.base.errors import ConfigError, ModelError
from tenuto.serve.app import build_app
from tenuto.serve.engine_process import EngineProcess
from tenuto.serve.metrics import Metrics
from tenuto.serve.process import ProcessLink
from tenuto.serve.run import bind, listen, serve
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.settings import ServeSettings
from tests.serve.server import END_SECONDS, Server, serving
from tests.serve.test_native import LONG, events, refusal

WITNESS = ("--model", "witness:0.001", "--context-length", "100000")
ENDLESS = {**LONG, "max_new_tokens": 90_000}


def follow(server: Server, session: str, begun: threading.Event) -> list[tuple[str, object]]:
    """Starts an endless turn and reads it to its end, whatever that is."""
    told: list[tuple[str, object]] = []
    with server.client() as http:
        http.post("/v1/sessions", json={"id": session})
        with http.stream("POST", f"/v1/sessions/{session}/turns", json=ENDLESS) as response:
            try:
                for name, _, data in events(response):
                    told.append((name, data))
                    begun.set()
            except httpx.HTTPError as error:
                told.append(("broken", error))
    return told


def gone(pid: int) -> bool:
    """Returns whether a process has ended and is not a zombie of a running one."""
    for _ in range(END_SECONDS * 20):
        try:
            state, parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
        except FileNotFoundError:
            return True
        if state == "Z" and parent == "1":  # its parent has ended: init reaps it
            return True
        time.sleep(0.05)
    return False


def test_sigterm_ends_streams_properly_and_exits_with_status_0() -> None:
    with serving(*WITNESS, "--drain-seconds", "0.3") as server, ThreadPoolExecutor(4) as pool:
        engine = server.engine_pid
        begun = [threading.Event() for _ in range(3)]
        streams = [pool.submit(follow, server, f"s{n}", begun[n]) for n in range(3)]
        assert all(event.wait(60) for event in begun)
        server.process.send_signal(signal.SIGTERM)
        ends = [stream.result()[-1] for stream in streams]
        assert [name for name, _ in ends] == ["aborted"] * 3
        assert server.process.wait(END_SECONDS) == 0
        assert gone(engine)


def test_a_turn_that_ends_in_time_is_committed_before_the_server_ends() -> None:
    with serving(*WITNESS, "--drain-seconds", "20") as server, ThreadPoolExecutor(2) as pool:
        with server.client() as http:
            http.post("/v1/sessions", json={"id": "s"})
            asked = pool.submit(http.post, "/v1/sessions/s/turns", json={**LONG, "stream": False})
            while httpx.get(f"{server.url}/v1/sessions/s", timeout=60).json()["turn"] is None and not asked.done():
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            late = httpx.post(f"{server.url}/v1/sessions/s/turns", json=LONG, timeout=60)
            assert refusal(late) == (503, "draining")
            assert late.headers["retry-after"]
            assert late.headers["connection"] == "close"  # the next request goes elsewhere
            assert asked.result().json()["state"] == "committed"
        assert server.process.wait(END_SECONDS) == 0


def test_a_killed_engine_is_reported_to_all_clients_and_its_server_exits_with_status_70() -> None:
    with serving(*WITNESS) as server, ThreadPoolExecutor(8) as pool, server.client() as http:
        begun = [threading.Event() for _ in range(3)]
        streams = [pool.submit(follow, server, f"s{n}", begun[n]) for n in range(3)]
        assert all(event.wait(60) for event in begun)
        line = [pool.submit(http.post, "/v1/sessions/s0/turns", json={**LONG, "if_busy": "queue"}) for _ in range(2)]
        while "tenuto_turns_waiting 2.0" not in http.get("/metrics").text:
            time.sleep(0.02)
        whole = {"model": "witness", "prompt": "a", "max_tokens": 90_000}
        asked = pool.submit(http.post, "/v1/completions", json=whole)
        while http.get("/metrics").text.count("tenuto_turns_running 4.0") == 0:
            time.sleep(0.02)
        engine = server.engine_pid
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            name, data = stream.result()[-1]
            assert name == "error"
            assert data["error"]["code"] == "engine_stopped"  # type: ignore[index]
            assert "SIGKILL; the request may have been carried out" in json.dumps(data)
        for future in (*line, asked):
            answer = future.result()
            assert refusal(answer) == (503, "engine_stopped")
            assert "SIGKILL" in answer.text
            assert answer.headers["retry-after"]
        assert server.process.wait(END_SECONDS) == 70
        assert gone(engine)
    assert server.lines[-1] == "tenuto: the engine process was killed by SIGKILL\n"


def test_a_server_without_its_engine_answers_503_until_it_ends() -> None:
    """Requests are sent to a server in this process, which does not end."""

    async def ask_everything() -> dict[str, int]:
        link = await ProcessLink.open(EngineProcess(WorkerSettings(model="witness")))
        edge = Edge(link, link.model, ServeSettings())
        transport = httpx.ASGITransport(build_app(edge, Metrics()))
        answers: dict[str, int] = {}
        async with httpx.AsyncClient(transport=transport, base_url="http://edge", timeout=60) as http:
            assert (await http.get("/v1/models")).status_code == 200
            described = (await http.get("/openapi.json")).json()["paths"]
            os.kill(link.pid, signal.SIGKILL)
            async with asyncio.timeout(END_SECONDS):
                await link.ended()
            for path, methods in described.items():
                for method in methods:
                    place = path.replace("{session_id}", "s").replace("{turn_id}", "turn-" + 24 * "0")
                    answer = await http.request(method, place, json=BODIES.get(path, {}))
                    answers[f"{method} {path}"] = answer.status_code
                    if answer.status_code == 503 and answer.content:
                        code = "overloaded_error" if path.startswith("/v1/messages") else "engine_stopped"
                        if path.startswith("/api/"):
                            assert answer.json()["error"]
                        else:
                            assert refusal(answer) == (503, code)
                        assert answer.headers["retry-after"]
            assert "tenuto_engine_up 0.0" in (await http.get("/metrics")).text
        await link.close()
        return answers

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(ask_everything())
    other = {place: status for place, status in answers.items() if status != 503}
    known = {
        "get /metrics": 200,
        "post /v1/sessions/import": 400,
        "post /v1/sessions/import/state": 415,
    }
    of_weights = (f"update_weights_from_{source}" for source in ("disk", "tensor", "distributed"))
    known |= dict.fromkeys((f"post /{route}" for route in (*of_weights, "init_weights_update_group")), 400)
    known |= {
        "post /get_weights_by_name": 400,
        "get /map/export": 400,
        "post /map/action": 400,
        "post /fleet/move": 400,
    }
    one = "/v1/responses/{response_id}"
    known |= dict.fromkeys((f"get {one}", f"delete {one}", f"post {one}/cancel", f"get {one}/input_items"), 400)
    one = "/v1/conversations/{conversation_id}"
    known |= {"post /v1/conversations": 200, f"post {one}": 400, f"post {one}/items": 400}
    chat = "/v1/chat/completions/{completion_id}"
    stored = {f"get {chat}": 404, f"get {chat}/messages": 404, f"delete {chat}": 404}
    known |= {"get /v1/chat/completions": 200, f"post {chat}": 400, **stored}
    known |= {f"{method} {one}": 404 for method in ("get", "delete")} | {f"get {one}/items": 404}
    known |= {f"{method} {one}/items/{{item_id}}": 404 for method in ("get", "delete")}
    one = "/v1/messages/batches/{batch_id}"
    known |= {"get /v1/messages/batches": 200, "post /v1/messages/batches": 400}
    known |= dict.fromkeys((f"get {one}", f"delete {one}", f"post {one}/cancel", f"get {one}/results"), 404)
    assert other == known  # the answers of a server without an engine, except the document and files


BODIES: dict[str, dict[str, object]] = {
    "/update_weight_version": {"new_version": "a"},
    "/v1/sessions/{session_id}/expect": {"within": 1},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "/unload_lora_adapter": {"lora_name": "a"},
    "/v1/embeddings": {"input": "a"},
    "/embeddings": {"input": "a"},
    "/embedding": {"content": "a"},
    "/encode": {"text": "a"},
    **{
        path: {"query": "a", "documents": ["b"]}
        for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")
    },
    **{path: {"text_1": "a", "text_2": "b"} for path in ("/score", "/v1/score")},
    **{path: {"model": "witness", "prompt": "a"} for path in ("/v1/completions", "/invocations")},
    "/v1/chat/completions": {"model": "witness", "messages": [{"role": "user", "content": "a"}]},
    "/chat/completions": {"model": "witness", "messages": [{"role": "user", "content": "a"}]},
    **{
        path: {"messages": [{"role": "user", "content": "a"}]}
        for path in ("/apply-template", "/chat/completions/input_tokens", "/v1/chat/completions/input_tokens")
    },
    "/v1/sessions/{session_id}/draft": {"input": "a"},
    "/v1/sessions/{session_id}/trim": {"turns": [1]},
    "/v1/responses": {"model": "witness", "input": "a"},
    "/v1/messages": {"model": "witness", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"model": "witness", "messages": [{"role": "user", "content": "a"}]},
    "/responses": {"input": "a"},
    "/completion": {"prompt": "a"},
    "/completions": {"prompt": "a"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/api/chat": {"model": "witness", "messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"model": "witness", "prompt": "a"},
    "/api/embed": {"model": "witness", "input": "a"},
    "/api/embeddings": {"model": "witness", "prompt": "a"},
    "/api/show": {"model": "witness"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/generate": {"text": "a"},
    "/abort_request": {"abort_all": True},
    "/open_session": {"capacity_of_str_len": 1},
    "/close_session": {"session_id": "s"},
}


def test_an_engine_whose_server_is_killed_ends_by_itself() -> None:
    with serving(*WITNESS) as server, ThreadPoolExecutor(2) as pool:
        begun = threading.Event()
        stream = pool.submit(follow, server, "s", begun)
        assert begun.wait(60)
        engine = server.engine_pid
        server.process.kill()
        assert stream.result()[-1][0] == "broken"
        assert gone(engine)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "/nowhere/at/all.gguf"), "/nowhere/at/all.gguf"),
        (("--model", "witness", "--page-size", "0"), "page_size"),
        (("--model", "witness", "--max-running-requests", "2000"), "token_budget"),
        (("--model", "witness", "--host", "0.0.0.0"), "API key"),
    ],
)
def test_a_server_that_cannot_start_gives_the_reason_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(RuntimeError) as failed:
        Server(*arguments)
    lines = [line for line in str(failed.value).splitlines()[1:] if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("tenuto: ")
    assert said in lines[0]


def test_a_port_is_taken_before_clients_can_connect_to_it() -> None:
    """So those of a fleet ask another replica while one loads its model."""
    with bind(ServeSettings(port=0)) as bound:
        place = bound.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place, END_SECONDS)
        listen(bound)
        socket.create_connection(place, END_SECONDS).close()
        with pytest.raises(ConfigError, match="cannot listen"):
            bind(ServeSettings(port=place[1]))


def test_an_engine_that_ends_while_loading_keeps_its_server_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenuto.serve.engine_process.sys.executable", "/bin/false")
    settings = WorkerSettings(model="witness")
    with pytest.raises(ModelError, match="exit status 1 before"), EngineProcess(settings) as engine:
        asyncio.run(serve(engine, ServeSettings(port=0)))


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 0.0, -1.0])
def test_the_patience_with_clients_that_do_not_read_must_be_finite(seconds: float) -> None:
    with pytest.raises(ConfigError, match="unread_seconds"):
        ServeSettings(unread_seconds=seconds)


def test_turns_waiting_for_a_session_at_shutdown_are_refused_as_draining() -> None:
    with serving(*WITNESS, "--drain-seconds", "0.2") as server, ThreadPoolExecutor(4) as pool, server.client() as http:
        begun = threading.Event()
        first = pool.submit(follow, server, "s", begun)
        assert begun.wait(60)
        waiting = [pool.submit(http.post, "/v1/sessions/s/turns", json={**LONG, "if_busy": "queue"}) for _ in range(2)]
        while http.get("/metrics").text.count("tenuto_turns_waiting 2.0") == 0:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        assert [refusal(future.result()) for future in waiting] == [(503, "draining")] * 2
        assert first.result()[-1][0] == "aborted"
        assert server.process.wait(END_SECONDS) == 0


def test_a_second_signal_does_not_wait_for_turns() -> None:
    with serving(*WITNESS, "--drain-seconds", "1000") as server, ThreadPoolExecutor(1) as pool:
        begun = threading.Event()
        stream = pool.submit(follow, server, "s", begun)
        assert begun.wait(60)
        server.process.send_signal(signal.SIGINT)
        while (
            httpx.post(f"{server.url}/v1/sessions/s/turns", json=LONG, timeout=60).json()["error"]["code"] != "draining"
        ):
            time.sleep(0.02)
        server.process.send_signal(signal.SIGINT)
        assert stream.result()[-1][0] == "aborted"
        assert server.process.wait(END_SECONDS) == 0
