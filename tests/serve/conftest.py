"""Servers that several tests share: the slow witness and the real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="session")
def smollm2_server(smollm2_path: Path) -> Iterator[Server]:
    """A server of the default model, for all tests that need one."""
    with serving("--model", str(smollm2_path), "--context-length", "2048", "--served-model-name", "smollm2") as server:
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
