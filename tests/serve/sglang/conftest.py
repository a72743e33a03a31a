"""Clients and sessions that tests of the SGLang interface share."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.serve.server import Server
from tests.serve.sglang.calls import closed, opened


@pytest.fixture
def smollm2(smollm2_server: Server) -> Iterator[httpx.Client]:
    with smollm2_server.client() as client:
        yield client


@pytest.fixture
def streaming(http: httpx.Client) -> Iterator[str]:
    """A session that is only appended to."""
    name = opened(http, streaming=True)
    yield name
    closed(http, name)


@pytest.fixture
def slow_streaming(slow_http: httpx.Client) -> Iterator[str]:
    name = opened(slow_http, streaming=True)
    yield name
    closed(slow_http, name)


@pytest.fixture
def slow_regular(slow_http: httpx.Client) -> Iterator[str]:
    name = opened(slow_http)
    yield name
    closed(slow_http, name)


@pytest.fixture
def regular(http: httpx.Client) -> Iterator[str]:
    """A session whose requests can all be continued."""
    name = opened(http)
    yield name
    closed(http, name)
