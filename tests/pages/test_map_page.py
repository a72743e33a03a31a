"""The page of the memory map, in a browser, with a running server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.eventually import eventually
from tests.pages.accessible import faults
from tests.serve.server import Server, free_port, serving
from tests.serve.test_native import events, turn

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

KEYS = '[[keys]]\ntenant = "ann"\nkey = "ann-secret"\n[[keys]]\ntenant = "bob"\nkey = "bob-secret"\n'
ENDLESS = {"input": [1, 2, 3], "max_new_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    arguments = ("--context-length", "2048", "--memory", "200KiB", "--host-tier", "8MiB", "--no-prefix-cache")
    with serving("--model", "witness:0.005", *arguments) as running:
        yield running
        running.audit()


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
        for session in client.get("/v1/sessions").json()["data"]:
            client.delete(f"/v1/sessions/{session['id']}")


@pytest.fixture
def family(http: httpx.Client) -> httpx.Client:
    """A session with two turns, and a fork after its first one that has another turn."""
    http.post("/v1/sessions", json={"id": "parent"})
    for _ in range(2):
        turn(http, "/v1/sessions/parent", input=list(range(100)), max_new_tokens=20)
    http.post("/v1/sessions/parent/fork", json={"id": "child", "turn": 1})
    turn(http, "/v1/sessions/child", input=[7] * 50, max_new_tokens=20)
    return http


def listed(page: Page, session: str) -> Locator:
    return page.get_by_role("list", name="Sessions", exact=True).get_by_role(
        "button", name=re.compile(rf"^{session}\b")
    )


def card(page: Page) -> Locator:
    return page.get_by_label("The chosen session")


def shows(locator: Locator, text: str) -> None:
    eventually(lambda: text in locator.inner_text())


def pixel(page: Page, unit: int) -> list[int]:
    """Returns the colour of a unit in the first grid, red, green and blue, near its first corner."""
    code = """unit => {
        const canvas = document.querySelector("canvas.grid"), side = canvas.height / canvas.clientHeight;
        const grid = [...document.querySelectorAll("canvas.grid")][0], size = Number(grid.dataset.size);
        const columns = Math.round(canvas.clientWidth / size);
        const x = ((unit % columns) * size + 2) * side, y = (Math.floor(unit / columns) * size + 2) * side;
        return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3);
    }"""
    found: list[int] = page.evaluate(code, unit)
    return found


def units(http: httpx.Client, session: str) -> list[int]:
    (found,) = [each for each in http.get("/map/feed").json()["sessions"] if each["id"] == session]
    return [
        unit
        for _, _, ranges in found["held"]
        for first, count in zip(ranges[::2], ranges[1::2], strict=True)
        for unit in range(first, first + count)
    ]


def test_forks_are_shown_with_the_memory_that_they_share(page: Page, server: Server, family: httpx.Client) -> None:
    page.goto(f"{server.url}/map")
    shows(page.locator(".figures"), "open sessions\n2")
    assert page.locator("svg.forks path.branch").count() == 1
    listed(page, "child").click()
    shows(card(page), "parent at 120")
    shared = set(units(family, "child")) & set(units(family, "parent"))
    assert shared
    shows(card(page), f"{len(shared)} of {len(units(family, 'child'))} units")
    shows(page.locator(".sum").first, f"{len(shared)} shared")


def test_a_unit_has_the_colour_of_its_session(page: Page, server: Server, family: httpx.Client) -> None:
    page.goto(f"{server.url}/map")
    listed(page, "parent").wait_for()
    own = sorted(set(units(family, "parent")) - set(units(family, "child")))
    dot = listed(page, "parent").locator(".dot").evaluate("dot => getComputedStyle(dot).backgroundColor")
    colour = [int(value) for value in re.findall(r"\d+", dot)]
    eventually(lambda: pixel(page, own[-1]) == colour)
    family.delete("/v1/sessions/parent")
    eventually(lambda: pixel(page, own[-1]) != colour)


def test_turns_appear_while_they_run_and_can_be_aborted(page: Page, server: Server, http: httpx.Client) -> None:
    page.goto(f"{server.url}/map")
    http.post("/v1/sessions", json={"id": "busy"})
    with http.stream("POST", "/v1/sessions/busy/turns", json=ENDLESS) as answer:
        told = events(answer)
        next(told)
        shows(page.get_by_label("What the turns do now"), "tokens/s")
        page.get_by_role("list", name="Sessions with turns").get_by_role("button", name="busy").click()
        shows(card(page), "of at most 1,900 tokens")
        page.get_by_role("button", name="Abort turn").click()
        assert list(told)[-1][0] == "aborted"
    shows(card(page), "The turn was rolled back.")
    shows(page.get_by_label("What the turns do now"), "ended")


def test_a_session_is_parked_exported_and_closed(
    page: Page, server: Server, family: httpx.Client, tmp_path: Path
) -> None:
    page.goto(f"{server.url}/map")
    listed(page, "parent").click()
    page.get_by_role("button", name="Park").click()
    shows(card(page), "tokens, host")
    assert family.get("/v1/sessions/parent").json()["computed"] == 0
    shows(page.get_by_label("Tiers"), "1 sessions")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "file")
    assert json.loads((tmp_path / "file").read_text())["id"] == "parent"
    page.get_by_role("button", name="Close", exact=True).click()
    page.get_by_role("button", name="Keep it").click()
    assert family.get("/v1/sessions/parent").status_code == 200
    page.get_by_role("button", name="Close", exact=True).click()
    page.get_by_role("button", name="Close it").click()
    listed(page, "parent").wait_for(state="detached")
    assert family.get("/v1/sessions/parent").status_code == 404


def test_the_keyboard_moves_between_units_and_chooses(page: Page, server: Server, family: httpx.Client) -> None:
    page.goto(f"{server.url}/map")
    listed(page, "child").wait_for()
    first = min(units(family, "parent") + units(family, "child"))
    page.locator("canvas.grid").focus()
    for _ in range(first + 1):
        page.keyboard.press("ArrowRight")
    said = page.locator(".pool [aria-live]")
    shows(said, f"page {first}")
    page.keyboard.press("Enter")
    eventually(lambda: card(page).locator("h2").inner_text() in ("parent", "child"))
    page.keyboard.press("Escape")
    shows(card(page), "Who holds what")


def test_the_slider_shows_what_was(page: Page, server: Server, family: httpx.Client) -> None:
    page.goto(f"{server.url}/map")
    listed(page, "child").wait_for()
    page.wait_for_timeout(1000)
    family.delete("/v1/sessions/child")
    listed(page, "child").wait_for(state="detached")
    page.wait_for_timeout(800)
    slider = page.get_by_label("Moment to show")
    slider.focus()
    for _ in range(40):
        if listed(page, "child").count():
            break
        page.keyboard.press("ArrowLeft")
    shows(page.locator(".past"), "the map as it was")
    assert listed(page, "child").count() == 1
    listed(page, "child").click()
    assert page.get_by_role("button", name="Close", exact=True).is_disabled()
    page.get_by_role("button", name="Live").click()
    listed(page, "child").wait_for(state="detached")


def test_the_page_finds_the_server_again_after_a_restart(page: Page, tmp_path: Path) -> None:
    arguments = ("--model", "witness", "--port", str(free_port()), "--journal", str(tmp_path / "journal"))
    with serving(*arguments) as first, first.client() as http:
        http.post("/v1/sessions", json={"id": "lasting"})
        turn(http, "/v1/sessions/lasting", input=[1] * 60)
        page.goto(f"{first.url}/map")
        listed(page, "lasting").click()
        shows(card(page), "64 in 1 turns")
        first.kill_all()
        shows(page.get_by_role("status").first, "no connection")
    with serving(*arguments) as second, second.client() as http:
        shows(page.get_by_role("status").first, "live")
        turn(http, "/v1/sessions/lasting", input=[2] * 10)
        listed(page, "lasting").wait_for()
        shows(listed(page, "lasting"), "78")


def test_a_key_is_asked_for_and_shows_what_its_tenant_has(page: Page, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    with serving("--model", "witness", "--keys", str(tmp_path / "keys.toml")) as server:
        for name in ("ann", "bob"):
            key: dict[str, Any] = {"headers": {"authorization": f"Bearer {name}-secret"}}
            httpx.post(f"{server.url}/v1/sessions", json={"id": f"of-{name}"}, **key, timeout=60)
        page.goto(f"{server.url}/map")
        for key_given in ("wrong", "ann-secret"):
            page.get_by_label("API key").fill(key_given)
            page.get_by_role("button", name="Continue").click()
        listed(page, "of-ann").wait_for()
        assert listed(page, "of-bob").count() == 0
        assert page.get_by_label("The auditor").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_no_serious_fault(page: Page, server: Server, family: httpx.Client, scheme: Any, width: int) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    turn(family, "/v1/sessions/child", input=[1])
    page.goto(f"{server.url}/map")
    listed(page, "child").click()
    assert faults(page) == []
    page.get_by_role("button", name="Close", exact=True).click()
    assert faults(page) == []
    wide: int = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
