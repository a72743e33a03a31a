"""Fields of chats and completions that clients of other servers use."""

from __future__ import annotations

import httpx

from tests.serve.openai.calls import HI


def test_the_model_may_be_left_out_and_the_fingerprint_stays_the_same(http: httpx.Client) -> None:
    prints = set()
    for path, body in (
        ("chat/completions", {"messages": HI, "max_tokens": 1}),
        ("completions", {"prompt": "a", "max_tokens": 1}),
        ("completions", {"prompt": "b", "max_tokens": 1}),
    ):
        answer = http.post(f"/v1/{path}", json=body).raise_for_status().json()
        assert answer["model"] == "witness"
        prints.add(answer["system_fingerprint"])
    assert len(prints) == 1
    response = http.post("/v1/responses", json={"input": "a", "max_output_tokens": 1, "store": False})
    assert response.json()["model"] == "witness"
    assert http.post("/v1/completions", json={"model": "x", "prompt": "a"}).status_code == 404
