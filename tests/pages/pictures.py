"""`python -m tests.pages.pictures`: makes the pictures in `docs/`, from a server of the default model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tenuto.base.config import cache_dir
from tenuto.demo import QUESTIONS
from tenuto.models.store import pull_default
from tests.cli.watching import shows, watching
from tests.pages.browser import browser
from tests.serve.server import Server, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DOCS = Path(__file__).parents[2] / "docs"


def conversations(server: Server, ended: threading.Event) -> None:
    """Lets several sessions talk and fork until the end."""

    def talk(name: str, questions: list[str]) -> None:
        with server.client(timeout=120) as http:
            http.post("/v1/sessions", json={"id": name, "system": "Answer at length."})
            for number in range(200):
                question = {"role": "user", "content": questions[number % len(questions)]}
                body = {"input": [question], "max_new_tokens": 60 + 17 * number % 50, "stream": False}
                if ended.is_set():
                    return
                if http.post(f"/v1/sessions/{name}/turns", json=body).status_code == 400:
                    http.post(f"/v1/sessions/{name}/rewind", json={"turn": 6})
                if number in (1, 3, 4):
                    fork = {"id": f"{name}-{number}", "turn": number}
                    http.post(f"/v1/sessions/{name}/fork", json=fork)
                    http.post(f"/v1/sessions/{name}-{number}/turns", json={**body, "max_new_tokens": 90})

    talkers = [threading.Thread(target=talk, args=each) for each in QUESTIONS.items()]
    for talker in talkers:
        talker.start()
    for talker in talkers:
        talker.join()


def picture(page: Page, name: str) -> None:
    """Writes what the page shows."""
    path = DOCS / f"{name}.png"
    page.screenshot(path=path)
    print(f"{path}: {path.stat().st_size // 1024} KiB")


def of_map(page: Page) -> None:
    page.wait_for_timeout(14_000)


def of_a_session(page: Page) -> None:
    page.wait_for_timeout(9_000)
    page.locator(".graph li button").first.click()
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(800)


def of_chat(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("48")
    page.get_by_role("button", name="Save").click()
    for text in ("What is the best way to make green tea?", "And how long should the leaves stay in it?"):
        page.get_by_label("Your message").fill(text)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Interrupt").wait_for()
        page.get_by_role("button", name="Send").wait_for(timeout=160_000)
    page.get_by_label("Turn 2").get_by_role("button", name="Edit").click()
    page.get_by_label("The message").fill("Which cup should I use?")
    page.get_by_role("button", name="Ask on a fork").click()
    page.get_by_role("button", name="Interrupt").wait_for()
    page.get_by_role("button", name="Send").wait_for(timeout=160_000)


async def terminal(url: str) -> str:
    """Returns an SVG of `tenuto top` after some seconds, with the first session chosen and turns under way."""
    async with watching(url, size=(100, 24)) as pilot:
        await pilot.press("down")
        await pilot.pause(9)
        await shows(pilot, r"decode .*\d\.\d *\n")
        return pilot.app.export_screenshot(title="tenuto top")


def of_the_terminal(chromium: Browser, svg: str) -> None:
    page = chromium.new_page(viewport={"width": 1280, "height": 860})
    page.set_content(svg)
    page.add_style_tag(content="body { margin: 0 } svg { display: block; width: 1280px }")
    size = page.locator("svg").bounding_box()
    assert size is not None
    page.set_viewport_size({"width": round(size["width"]), "height": round(size["height"])})
    picture(page, "top")
    page.close()


def main() -> None:
    model = str(pull_default(cache_dir()))
    arguments = ("--model", model, "--served-model-name", "smollm2", "--context-length", "2048", "--memory", "140MiB")
    pictures: list[tuple[str, str, str, Callable[[Page], None]]] = [
        ("map", "/map", "light", of_map),
        ("map-dark", "/map", "dark", of_a_session),
        ("chat", "/", "light", of_chat),
    ]
    with serving(*arguments, "--host-tier", "64MiB", "--page-size", "16") as server:
        httpx.get(f"{server.url}/health", timeout=60).raise_for_status()
        ended = threading.Event()
        talking = threading.Thread(target=conversations, args=(server, ended))
        talking.start()
        try:
            svg = asyncio.run(terminal(server.url))  # before the browser, which has its own event loop
            with browser() as chromium:
                of_the_terminal(chromium, svg)
                for name, path, scheme, prepare in pictures:
                    if path == "/":
                        ended.set()
                        talking.join()
                    context = chromium.new_context(viewport={"width": 1280, "height": 860}, color_scheme=scheme)  # type: ignore[arg-type]
                    page = context.new_page()
                    page.goto(server.url + path)
                    prepare(page)
                    picture(page, name)
                    context.close()
        finally:
            ended.set()
            talking.join()


if __name__ == "__main__":
    main()
