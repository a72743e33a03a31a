"""The path of a journal, and the end of journals that a test leaves open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.session.journals import left_open


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while left_open:
        left_open.pop().close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"
