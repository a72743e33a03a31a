"""Embeddings in SGLang's form."""

from __future__ import annotations

from typing import Any

import httpx

from tests.serve.server import Server


def test_encode_answers_one_input_or_a_list(witness: Server) -> None:
    with witness.client() as http:
        wanted = [
            entry["embedding"] for entry in http.post("/v1/embeddings", json={"input": ["tea", "ü"]}).json()["data"]
        ]
        found = http.post("/encode", json={"text": ["tea", "ü"], "rid": "a"}).raise_for_status().json()
        assert [entry["embedding"] for entry in found] == wanted
        assert [entry["meta_info"]["prompt_tokens"] for entry in found] == [3, 2]
        assert http.post("/encode", json={"text": "tea"}).json()["embedding"] == wanted[0]
        ids = [int(token) for token in http.post("/tokenize", json={"prompt": "tea"}).json()["tokens"]]
        assert http.post("/encode", json={"input_ids": ids}).json()["embedding"] == wanted[0]
        assert http.post("/encode", json={"input_ids": [ids]}).json()[0]["embedding"] == wanted[0]
        wrongs: list[dict[str, Any]] = [{}, {"text": "a", "input_ids": [1]}, {"text": ""}, {"input_ids": []}]
        for wrong in wrongs:
            refused = http.post("/encode", json=wrong)
            assert refused.status_code == 400, refused.text
        assert httpx.post(f"{witness.url}/encode", json={"text": "a", "image_data": "x"}, timeout=60).status_code == 400
