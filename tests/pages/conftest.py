"""A browser for the tests of a file, and a page for each, which must not report an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.pages.browser import CHROMIUM, browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")  # while it runs, no other test could run an event loop in this thread
def chromium() -> Iterator[Browser]:
    pytest.importorskip("playwright", reason="tests of pages need playwright")
    if CHROMIUM is None:
        pytest.skip("tests of pages need Chromium: apt-get install chromium")
    with browser() as running:
        yield running


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    context = chromium.new_context(
        viewport={"width": 1280, "height": 900}, accept_downloads=True, reduced_motion="reduce"
    )
    context.set_default_timeout(60_000)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    yield page
    context.close()
    assert not [error for error in errors if "Failed to load resource" not in error]  # the server's refusals
