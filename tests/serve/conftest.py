"""A server that several tests share, of the slow witness, and clients."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.serve.server import Server, serving


@pytest.fixture(scope="session")
def slow_witness() -> Iterator[Server]:
    """A server of the witness on which turns last long enough to be ended by a test, however busy the machine is: 4,000
    tokens take 20 seconds."""
    with serving("--model", "witness:0.005", "--context-length", "4096") as server:
        yield server
        server.audit()


@pytest.fixture
def http(witness: Server) -> Iterator[httpx.Client]:
    with witness.client() as client:
        yield client


@pytest.fixture
def slow_http(slow_witness: Server) -> Iterator[httpx.Client]:
    with slow_witness.client() as client:
        yield client
