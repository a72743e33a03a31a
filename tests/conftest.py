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
    """The longest tests go first: what is left for the end, several processes can share."""
    items.sort(key=lambda item: item.path.parent.name not in LONG)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, in the user's cache; fetched by the first test that needs it."""
    return pull_default(cache_dir())


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Files and directories get the modes that they are created with, also those of processes that are started."""
    before = os.umask(0)
    yield
    os.umask(before)
