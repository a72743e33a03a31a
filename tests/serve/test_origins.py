"""Pages of other origins may use the server from a browser if the operator allows it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tenuto.base.errors import ConfigError
from tenuto.serve.shared.settings import ServeSettings
from tests.serve.server import serving

APP, KEY = "https://app.example", {"authorization": "Bearer k"}
ALLOW = "access-control-allow-origin"
ASKING = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
STREAM = {"model": "default", "prompt": [5, 6], "max_tokens": 4, "stream": True}


@pytest.fixture(scope="module")
def opened() -> Iterator[httpx.Client]:
    with (
        serving("--model", "witness", "--api-key", "k", "--allowed-origins", "https://App.example") as server,
        server.client() as client,
    ):
        yield client


def test_a_browser_may_ask_before_it_sends_the_key(opened: httpx.Client) -> None:
    answer = opened.options("/v1/completions", headers={"origin": APP, **ASKING})
    assert (answer.status_code, answer.headers[ALLOW]) == (200, APP)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == ASKING["access-control-request-headers"]


def test_a_page_of_an_allowed_origin_reads_streams_and_errors(opened: httpx.Client) -> None:
    answer = opened.post("/v1/completions", json=STREAM, headers={"origin": APP, **KEY})
    assert (answer.status_code, answer.headers[ALLOW]) == (200, APP)
    assert answer.text.endswith("data: [DONE]\n\n")
    for headers, status in (({}, 401), ({**KEY, "content-type": "application/json"}, 400)):
        refused = opened.post("/v1/completions", content="{}", headers={"origin": APP, **headers})
        assert (refused.status_code, refused.headers[ALLOW]) == (status, APP)


def test_other_origins_are_not_allowed(opened: httpx.Client) -> None:
    other = {"origin": "https://other.example"}
    assert opened.options("/v1/completions", headers={**other, **ASKING}).status_code == 400
    assert ALLOW not in opened.get("/v1/models", headers={**other, **KEY}).headers


def test_without_the_option_no_origin_is_allowed(http: httpx.Client) -> None:
    assert http.options("/v1/completions", headers={"origin": APP, **ASKING}).status_code == 405
    assert ALLOW not in http.get("/v1/models", headers={"origin": APP}).headers


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://app.example/path", ""])
def test_what_is_not_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed: origins such as"):
        ServeSettings(allowed_origins=(origin,))
