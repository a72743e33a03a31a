"""Fixtures that tests of several packages share."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tenuto.base.config import cache_dir
from tenuto.models.store import pull_default
from tests.deadlines import allow_any_time
from tests.serve.server import Server, serving

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels for GPUs are interpreted; Triton reads it when it is first imported

allow_any_time()

HERE = Path(__file__).parent

LONG = ("numerics", "sim")

ALONE = {*LONG, "base", "exec", "formats", "hybrid", "kernels", "memory", "models", "sched", "session", "text"}
"""Tests that depend on nothing but their own computations. The others drive processes, threads and connections."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest tests first, so that the processes can share the short ones at the end. In continuous
    integration, a test of processes that fails runs once more, as its machine may have stood still for a while; the
    closing line counts such tests as rerun."""
    items.sort(key=lambda item: item.path.parent.name not in LONG)
    if os.environ.get("CI"):
        for item in items:
            if item.path.relative_to(HERE).parts[0] not in ALONE:
                item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish() -> None:
    """Excludes what imports have made from garbage collections, which would look at all of it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, in the user's cache; the first test that needs it fetches it."""
    return pull_default(cache_dir())


@pytest.fixture(scope="session")
def smollm2_server(smollm2_path: Path) -> Iterator[Server]:
    """A server of the default model, for all tests that need one."""
    with serving("--model", str(smollm2_path), "--context-length", "2048", "--served-model-name", "smollm2") as server:
        yield server
        server.audit()


@pytest.fixture(scope="session")
def witness_server() -> Iterator[Server]:
    """A server of the witness. Tests use `witness`, which clears it for each module."""
    with serving("--model", "witness", "--context-length", "4096") as server:
        yield server


@pytest.fixture(scope="module")
def witness(witness_server: Server) -> Iterator[Server]:
    """A server of the witness, without sessions or cached memory of other modules. It must pass an audit when the
    module's tests are done."""
    yield witness_server
    witness_server.audit()
    with witness_server.client() as http:
        for session in http.get("/v1/sessions").raise_for_status().json()["data"]:
            http.delete(f"/v1/sessions/{session['id']}").raise_for_status()
        http.post("/flush_cache").raise_for_status()


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Clears the umask, so that files show the modes they are created with, also in started processes."""
    before = os.umask(0)
    yield
    os.umask(before)
