"""A server that is killed and started again with its journal has every acknowledged change."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tenuto.memory.tiers.unit_files import INDEX
from tests.private import open_to_others
from tests.serve.killing import kill_often
from tests.serve.server import Server, serving


def test_acknowledged_changes_survive_kills_at_random_moments(tmp_path: Path) -> None:
    known = kill_often(tmp_path / "journal", 4, seed=10)
    assert known.operations > 0


@pytest.mark.usefixtures("no_umask")
def test_a_conversation_continues_after_a_restart_as_if_uninterrupted(witness: Server, tmp_path: Path) -> None:
    def say(server: Server, text: str) -> str:
        body = {"input": [{"role": "user", "content": text}], "max_new_tokens": 8, "stream": False}
        answer = httpx.post(f"{server.url}/v1/sessions/s/turns", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["text"])

    def metric(server: Server, name: str) -> float:
        found = re.search(
            rf"^{re.escape(name)} (\S+)$", httpx.get(f"{server.url}/metrics", timeout=60).text, re.MULTILINE
        )
        return float(found[1]) if found else 0.0

    texts = ["hello", "and again", "and at last"]
    httpx.post(f"{witness.url}/v1/sessions", json={"id": "s", "system": "Be brief."}, timeout=60)
    whole = [say(witness, text) for text in texts]
    parts = []
    for number, text in enumerate(texts):
        options = ("--journal", str(tmp_path / "journal"), "--disk-tier", str(tmp_path / "tier"))
        with serving("--model", "witness", *options) as server:
            assert metric(server, 'tenuto_snapshots_total{outcome="restored"}') == (number > 0)
            if number == 0:
                httpx.post(f"{server.url}/v1/sessions", json={"id": "s", "system": "Be brief."}, timeout=60)
            parts.append(say(server, text))
            assert metric(server, "tenuto_restored_sessions_total") == (number > 0)
            assert not metric(server, 'tenuto_recomputed_tokens_total{reason="restored"}')
            assert {"journal", "journal-wal"} <= {path.name for path in tmp_path.iterdir()}
            assert not [*open_to_others(tmp_path)]
            assert server.stop() == 0
        assert not [*open_to_others(tmp_path)]
        assert {path.name for path in (tmp_path / "tier").iterdir()} > {INDEX}
    assert parts == whole


def test_a_repeated_request_gets_the_same_answer_from_the_next_server(tmp_path: Path) -> None:
    options = ("--model", "witness", "--journal", str(tmp_path / "journal"))
    key = {"idempotency-key": "k"}
    body = {"input": "one two", "max_new_tokens": 12, "temperature": 1, "logprobs": 2, "stream": False}
    late = {"input": "three", "max_new_tokens": 9, "stop": ["e"], "stream": False}
    chat = {
        "model": "default",
        "session_id": "chat",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 5,
    }
    with serving(*options) as server, server.client() as http:
        http.post("/v1/sessions", json={"id": "s"}).raise_for_status()
        first = http.post("/v1/sessions/s/turns", json=body, headers=key).json()
        other = http.post("/v1/sessions/s/turns", json=late, headers={"idempotency-key": "other"}).json()
        said = http.post("/v1/chat/completions", json=chat, headers=key).raise_for_status().json()
    with serving(*options) as server, server.client() as http:
        before = http.get("/v1/sessions/s").json()["version"]
        retried = {**key, "if-match": '"0"'}
        assert http.post("/v1/sessions/s/turns", json=body, headers=retried).json() == first
        assert http.get(f"/v1/sessions/s/turns/{first['id']}").json() == first
        events = http.post("/v1/sessions/s/turns", json={**late, "stream": True}, headers={"idempotency-key": "other"})
        assert events.status_code == 422  # another body
        assert http.post("/v1/sessions/s/turns", json=late, headers={"idempotency-key": "other"}).json() == other
        assert http.post("/v1/chat/completions", json=chat, headers=key).json()["choices"] == said["choices"]
        changed = http.post("/v1/sessions/s/turns", json={**body, "max_new_tokens": 3}, headers=key)
        assert changed.json()["error"]["code"] == "idempotency_key_reused"
        assert http.get("/v1/sessions/s").json()["version"] == before == 2
        assert http.get("/v1/sessions/chat").json()["version"] == 1
        http.post("/v1/sessions/s/append", json={"input": [1]}, headers={"idempotency-key": "new"}).raise_for_status()
        assert http.get("/v1/sessions/s").json()["version"] == 3
        server.audit()


def test_a_server_whose_journal_cannot_be_used_reports_it_and_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("no journal " * 100)
    with pytest.raises(RuntimeError, match=f"the journal {path} cannot be used: file is not a database"):
        Server("--model", "witness", "--journal", str(path))
