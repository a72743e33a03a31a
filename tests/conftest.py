"""Fixtures that tests of several packages share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tenuto.base.config import cache_dir
from tenuto.models.store import pull_default

settings.register_profile("tenuto", deadline=None)  # no test asserts on time
settings.load_profile("tenuto")


LONG = ("numerics", "sim")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest tests first, so that the processes can share the short ones at the end."""
    items.sort(key=lambda item: item.path.parent.name not in LONG)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, in the user's cache; the first test that needs it fetches it."""
    return pull_default(cache_dir())


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Clears the umask, so that files show the modes they are created with, also in started processes."""
    before = os.umask(0)
    yield
    os.umask(before)
