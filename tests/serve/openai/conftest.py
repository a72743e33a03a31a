"""Servers and clients that tests of the OpenAI interface share."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.serve.openai.calls import client_of, held, is_left
from tests.serve.server import Server, serving


@pytest.fixture(scope="package")
def witness() -> Iterator[Server]:
    """A server without the prefix cache: memory of closed sessions would hide leaks."""
    with serving("--model", "witness", "--context-length", "4096", "--no-prefix-cache") as server:
        yield server
        server.audit()


@pytest.fixture
def client(witness: Server) -> Iterator[OpenAI]:
    before = held(witness)
    with client_of(witness) as client:
        yield client
    is_left(witness, before)


@pytest.fixture(scope="package")
def real(smollm2_server: Server) -> Iterator[OpenAI]:
    flush = f"{smollm2_server.url}/flush_cache"  # memory of closed sessions
    httpx.post(flush, timeout=60).raise_for_status()
    before = held(smollm2_server)
    with client_of(smollm2_server) as client:
        yield client
    httpx.post(flush, timeout=60).raise_for_status()
    is_left(smollm2_server, before)


@pytest.fixture(scope="package")
def slow() -> Iterator[Server]:
    """A server on which turns outlast the tests that end them: 4,000 tokens take 20 seconds."""
    named = ("--served-model-name", "witness")
    with serving("--model", "witness:0.005", "--context-length", "4096", "--no-prefix-cache", *named) as server:
        yield server
        server.audit()
