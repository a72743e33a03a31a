"""A server with a draft model: output is the same, its memory is counted, and models that do not fit are refused."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

import tenuto
from tenuto.base.config import WorkerSettings
from tenuto.base.errors import ConfigError
from tenuto.runtime.models import load_model
from tests.serve.server import serving
from tests.serve.test_operations import scraped, value

SLOW = "witness:0.005"
"""The time of a step, beside which that of the draft model is short. How many tokens are guessed depends on both."""


def said(http: httpx.Client) -> list[int]:
    """Returns what a new session says."""
    path = f"/v1/sessions/{http.post('/v1/sessions', json={}).json()['id']}"
    answer = http.post(f"{path}/turns", json={"input": "hello", "max_new_tokens": 80, "stream": False})
    assert answer.status_code == 200, answer.text
    tokens: list[int] = http.get(f"{path}/turns").json()["data"][0]["output_tokens"]
    return tokens


def test_a_server_with_a_draft_model_says_the_same_and_counts_its_memory() -> None:
    with serving("--model", SLOW, "--speculate", "witness", "--context-length", "1000") as server:
        with server.client() as http:
            guessed = said(http)
            samples = scraped(http)
            assert value(samples, "guessed_tokens_total", outcome="accepted", source="draft") > 0
            assert value(samples, "guessed_tokens_total", outcome="rejected", source="draft") == 0
            assert value(samples, "memory_units", group="draft model full0", state="leased", tier="device") > 0
            report = http.get("/audit").json()
            draft = next(pool for pool in report["pools"] if pool["name"] == "draft model full0")
            assert draft["by_holder"] == {"draft model": draft["leased"]}
            assert http.post("/release_memory_occupation", json={}).status_code == 200
            report = http.get("/audit").json()
            assert next(pool for pool in report["pools"] if pool["name"] == "draft model full0")["leased"] == 0
            assert http.post("/resume_memory_occupation", json={}).status_code == 200
            assert said(http) == guessed
            server.audit()
        assert server.stop() == 0
    with serving("--model", "witness", "--speculate", "off") as server, server.client() as http:
        assert said(http) == guessed


def test_a_draft_model_of_another_vocabulary_is_refused(smollm2_path: Path) -> None:
    settings = WorkerSettings(model="witness", config={"speculate": str(smollm2_path)})
    with pytest.raises(ConfigError, match=r"another vocabulary \(49152 tokens\); allowed: .* \(1000 tokens\)"):
        load_model(settings)


@pytest.mark.parametrize("given", ["", " ", 5, None])
def test_a_name_of_a_draft_model_is_text(given: object) -> None:
    with pytest.raises(ConfigError, match=r"speculate is .*; allowed: auto, suffix, mtp, off, or the name or path"):
        tenuto.Engine("witness", speculate=given)  # type: ignore[arg-type]


def test_a_draft_model_that_does_not_exist_is_named() -> None:
    with pytest.raises(tenuto.TenutoError, match="nowhere"):
        tenuto.Engine("witness", speculate="/nowhere/model.gguf")


def test_an_engine_in_python_takes_a_draft_model() -> None:
    with tenuto.Engine(SLOW, speculate="witness", context_length=1000) as engine:
        result = engine.session().turn("hello", max_new_tokens=80).result()
        assert result.usage.accepted > 0
        assert result.usage.rejected == 0
