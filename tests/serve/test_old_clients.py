"""Clients of HTTP/1.0, and clients that close only their half of a connection."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.serve.raw import Raw
from tests.serve.server import Server


def exchanged(
    server: Server, method: str, path: str, body: dict[str, Any] | None = None
) -> tuple[dict[str, str], bytes]:
    """Returns headers, with the status as `status`, and body of an answer to an HTTP/1.0 client."""
    content = json.dumps(body).encode() if body is not None else b""
    head = f"{method} {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    with Raw(server) as raw:
        raw.send(head.encode() + content)
        whole = raw.answer_of(2**20)
    first, *lines = whole.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return {**headers, "status": first.split()[1]}, whole.partition(b"\r\n\r\n")[2]


def test_an_http_1_0_client_gets_answers_without_chunks_that_end_with_the_connection(witness: Server) -> None:
    body = {"input_ids": [5, 6], "stream": True, "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
    headers, events = exchanged(witness, "POST", "/generate", body)
    assert "transfer-encoding" not in headers
    assert (headers["status"], headers["connection"]) == ("200", "close")
    *told, done = events.decode().strip().split("\n\n")
    assert done == "data: [DONE]"
    with witness.client() as http:
        whole = http.post("/generate", json={**body, "stream": False}).json()
    assert json.loads(told[-1].removeprefix("data: "))["output_ids"] == whole["output_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_closed_its_sending_half_gets_its_answer(slow_witness: Server, stream: bool) -> None:
    body = {"input_ids": [5, 6], "stream": stream, "sampling_params": {"max_new_tokens": 60, "temperature": 0}}
    content = json.dumps(body).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with Raw(slow_witness) as raw:
        raw.send(head % len(content) + content)
        raw.send_no_more()
        answer = raw.answer_of(2**20)
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b'"finish_reason":{') == 1
    assert answer.endswith(b"0\r\n\r\n" if stream else b"}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_is_noticed_though_it_might_have_closed_only_its_half(
    slow_witness: Server, stream: bool
) -> None:
    with slow_witness.client() as http:
        session = http.post("/v1/sessions", json={}).json()["id"]
        body = {"input": [5], "max_new_tokens": 3000, "ignore_eos": True, "stream": stream}
        content = json.dumps(body).encode()
        head = f"POST /v1/sessions/{session}/turns HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        with Raw(slow_witness) as raw:
            raw.send(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            while http.get(f"/v1/sessions/{session}").json()["turn"] is None:
                time.sleep(0.01)
        while http.get(f"/v1/sessions/{session}").json()["turn"] is not None:
            time.sleep(0.01)
        assert http.get(f"/v1/sessions/{session}").json()["version"] == 0


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_http_1_0_client_also_gets_answers_of_known_length(witness: Server, method: str) -> None:
    headers, body = exchanged(witness, method, "/v1/models")
    assert "transfer-encoding" not in headers
    if method == "GET":
        assert (headers["status"], len(body)) == ("200", int(headers["content-length"]))
        assert json.loads(body)["object"] == "list"
    else:
        assert body == b""
