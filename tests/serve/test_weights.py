"""SGLang's calls for training loops, on a real server: memory is released for a while, and weights are replaced."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.serve.server import Server, serving

MODEL = Path(__file__).parent.parent / "hybrid" / "model"


@pytest.fixture(scope="module")
def hybrid() -> Iterator[Server]:
    with serving("--model", str(MODEL), "--context-length", "512", "--host-tier", "16MiB") as server:
        yield server
        server.audit()


@pytest.fixture
def http(hybrid: Server) -> Iterator[httpx.Client]:
    with hybrid.client() as client:
        yield client


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same shape, without a tokenizer, as a trainer writes them."""
    directory = tmp_path_factory.mktemp("others")
    shutil.copy(MODEL / "config.json", directory)
    weights = load_file(MODEL / "model.safetensors")
    weights["model.norm.weight"][::2] *= -1
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def opened(http: httpx.Client) -> str:
    """Opens a session and runs a first turn."""
    name = http.post("/v1/sessions", json={}).json()["id"]
    said(http, name, "Returns the name of the")
    return name


def said(http: httpx.Client, session: str, text: str) -> str:
    body = {"input": text, "max_new_tokens": 12, "stream": False}
    answer = http.post(f"/v1/sessions/{session}/turns", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["text"]


def asked(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_turns_are_refused_while_memory_is_released_and_sessions_continue_afterwards(http: httpx.Client) -> None:
    session, twin = opened(http), opened(http)
    expected = said(http, twin, " and a list of")
    before = http.get(f"/v1/sessions/{session}").json()
    asked(http, "/pause_generation", mode="retract")
    asked(http, "/release_memory_occupation")
    asked(http, "/continue_generation")
    refused = http.post("/generate", json={"text": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory_released")
    assert refused.headers["retry-after"]
    assert http.get("/health").status_code == 200
    shown = http.get(f"/v1/sessions/{session}").json()
    assert (shown["tokens"], shown["version"]) == (before["tokens"], before["version"])
    asked(http, "/release_memory_occupation", tags=["cuda_graph"])
    asked(http, "/resume_memory_occupation", tags=["weights", "cuda_graph"])
    assert http.post("/generate", json={"text": "a"}).status_code == 503
    asked(http, "/resume_memory_occupation", tags=["kv_cache"])
    assert said(http, session, " and a list of") == expected
    for tags in (["cuda_graphs"], [], "weights"):
        assert http.post("/release_memory_occupation", json={"tags": tags}).status_code == 400


def test_replaced_weights_use_no_memory_of_the_old_ones(http: httpx.Client, others: Path) -> None:
    first, second, third = opened(http), opened(http), opened(http)
    with_old = said(http, first, " and a list of")
    answer = asked(http, "/update_weights_from_disk", model_path=str(others))
    assert answer["success"] is True
    with_new = said(http, second, " and a list of")
    assert with_new != with_old
    info = http.get("/get_model_info").json()
    assert (info["model_path"], info["tokenizer_path"], info["weight_version"]) == (str(others), str(MODEL), "1")
    asked(http, "/update_weights_from_disk", model_path=str(MODEL), weight_version="trained")
    assert said(http, third, " and a list of") == with_old
    assert http.get("/get_model_info").json()["weight_version"] == "trained"


def test_exported_state_belongs_to_the_weights_that_computed_it(http: httpx.Client, others: Path) -> None:
    session = opened(http)
    headers = {"content-type": "application/octet-stream"}

    def imported(file: bytes) -> httpx.Response:
        return http.post("/v1/sessions/import/state", params={"id": "imported"}, content=file, headers=headers)

    old = http.get(f"/v1/sessions/{session}/export/state").raise_for_status().content
    asked(http, "/update_weights_from_disk", model_path=str(others))
    refused = imported(old)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request"), refused.text
    assert http.get("/v1/sessions/imported").status_code == 404
    said(http, session, " and a list of")
    new = http.get(f"/v1/sessions/{session}/export/state").raise_for_status().content
    asked(http, "/pause_generation", mode="retract")
    asked(http, "/release_memory_occupation")
    assert imported(new).status_code == 201  # it keeps only its tokens
    asked(http, "/resume_memory_occupation")
    asked(http, "/continue_generation")
    assert said(http, "imported", " of") == said(http, session, " of")
    asked(http, "/update_weights_from_disk", model_path=str(MODEL))
    assert imported(new).status_code in (400, 409)
    assert http.delete("/v1/sessions/imported").status_code == 204
    assert imported(old).status_code == 201


def test_weights_overwritten_while_released_are_noticed(http: httpx.Client, others: Path, tmp_path: Path) -> None:
    expected = said(http, opened(http), " and a list of")
    copy = shutil.copytree(others, tmp_path / "weights")
    asked(http, "/update_weights_from_disk", model_path=str(copy))
    session = opened(http)
    asked(http, "/pause_generation", mode="retract")
    asked(http, "/release_memory_occupation")
    shutil.copy(MODEL / "model.safetensors", copy)
    asked(http, "/resume_memory_occupation")
    asked(http, "/continue_generation")
    body = {"input": " and", "max_new_tokens": 1, "stream": False}
    assert asked(http, f"/v1/sessions/{session}/turns", **body)["usage"]["cached_tokens"] == 0
    assert said(http, opened(http), " and a list of") == expected
    asked(http, "/update_weights_from_disk", model_path=str(MODEL))


def test_damaged_or_misshapen_weights_change_nothing(http: httpx.Client, others: Path, tmp_path: Path) -> None:
    session, twin = opened(http), opened(http)
    expected, version = said(http, twin, " and a list of"), http.get("/get_model_info").json()["weight_version"]
    shutil.copytree(others, tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    shutil.copytree(others, tmp_path / "narrow")
    config = (tmp_path / "narrow" / "config.json").read_text()
    (tmp_path / "narrow" / "config.json").write_text(config.replace('"sliding_window": 64', '"sliding_window": 32'))
    for path in (tmp_path / "cut", tmp_path / "narrow", tmp_path / "none"):
        refused = http.post("/update_weights_from_disk", json={"model_path": str(path)})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model_path")
    for body in ({}, {"model_path": str(others), "flush_cache": False}):
        assert http.post("/update_weights_from_disk", json=body).status_code == 400
    assert http.get("/get_model_info").json()["weight_version"] == version
    assert said(http, session, " and a list of") == expected


def test_sessions_keep_their_state_if_they_are_to(http: httpx.Client, others: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(MODEL, copy)
    session, twin = opened(http), opened(http)
    parked = http.post(f"/v1/sessions/{session}/fork", json={}).json()["id"]
    expected = said(http, twin, " and a list of")

    def cached(name: str, text: str) -> tuple[str, int]:
        body = {"input": text, "max_new_tokens": 12, "stream": False}
        answer = http.post(f"/v1/sessions/{name}/turns", json=body).raise_for_status().json()
        return answer["text"], answer["usage"]["cached_tokens"]

    computed = http.get(f"/v1/sessions/{session}").json()["computed"]
    assert computed > 0
    asked(http, "/update_weights_from_disk", model_path=str(copy), keep_state=True, weight_version="copy")
    assert cached(session, " and a list of") == (expected, computed)  # equal weights, so the state is right
    found = http.get(f"/v1/sessions/{session}/tokens").json()
    assert [span["weight_version"] for span in found["state"]][-1] == "copy"
    asked(http, "/update_weights_from_disk", model_path=str(others), keep_state=True)
    mixed, kept = cached(parked, " and a list of")
    assert kept == computed
    anew = opened(http)  # the same text, but under other weights from the beginning
    assert cached(anew, " and a list of")[0] != expected
    asked(http, "/update_weights_from_disk", model_path=str(others))
    assert cached(session, " of")[1] == 0
    asked(http, "/update_weights_from_disk", model_path=str(MODEL))
    assert mixed != expected
