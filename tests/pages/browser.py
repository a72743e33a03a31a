"""A headless Chromium, for tests of pages and for pictures of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--font-render-hinting=none"]


@contextmanager
def browser() -> Iterator[Browser]:
    """Runs a browser inside the context. It must be installed; see `CHROMIUM`."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - need not be installed

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, env={**os.environ, "LANG": "C"})
        try:
            yield running
        finally:
            running.close()
