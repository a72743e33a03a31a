"""`tenuto top` with a running server, as its users see it on a terminal of 80 columns and 24 lines."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tenuto.cli.top import run
from tests.cli.inside import run_inside
from tests.cli.test_cli import TENUTO, Terminal
from tests.cli.watching import seen, shows, watching
from tests.serve.server import Server, free_port, serving
from tests.serve.test_native import events, turn

if TYPE_CHECKING:
    from textual.pilot import Pilot

pytest.importorskip("textual", reason="the terminal's map needs textual")

KEYS = '[[keys]]\ntenant = "ann"\nkey = "ann-secret"\n[[keys]]\ntenant = "bob"\nkey = "bob-secret"\n'
ENDLESS = {"input": [1, 2, 3], "max_new_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    arguments = ("--context-length", "2048", "--max-running", "1", "--host-tier", "8MiB", "--no-prefix-cache")
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


async def choose(pilot: Pilot[Any], session: str) -> None:
    """Looks for a session, which is chosen then."""
    await pilot.press("slash", *session, "enter")
    await shows(pilot, rf"● {session} ")


def test_sessions_are_shown_with_the_units_that_forks_share(server: Server, family: httpx.Client) -> None:
    async def story() -> None:
        async with watching(server.url) as pilot:
            audit = family.get("/audit").json()["pools"][0]
            found = await shows(pilot, r"● child +idle +(\d+) +(\d+) +\d+ +-")
            parent = await shows(pilot, r"● parent +idle +(\d+) +(\d+) +240 +-")
            assert found[2] == parent[2] == str(audit["by_holder"]["shared"])
            await shows(
                pilot,
                f"{audit['leased']} leased \\+ 0 in limbo \\+ {audit['free']:,} free = {audit['capacity']:,} units",
            )
            await shows(pilot, rf"full0 {audit['capacity']:,} pages of \d+ tokens.*: .*\d+ shared")
            await shows(pilot, r"sessions 2 +running 0 of 1 +waiting 0")
            await shows(pilot, r"1 Sessions 2 Turns .* Abort .* Close .* q Quit *$")
            assert [len(line) for line in seen(pilot).splitlines()] == [80] * 24
            await choose(pilot, "child")
            await pilot.press("enter")
            await shows(pilot, rf"shared +{found[2]} of {found[1]} units")
            await shows(pilot, r"forked +parent at 120")

    asyncio.run(story())


def test_sessions_are_sorted_and_found(server: Server, family: httpx.Client) -> None:
    async def story() -> None:
        async with watching(server.url) as pilot:
            for sort in ("units", "tokens"):
                await pilot.press("s")
                await shows(pilot, rf"by {sort}(.|\n)*● parent (.|\n)*● child ")
            turn(family, "/v1/sessions/child", input=[8] * 400, max_new_tokens=4)
            await shows(pilot, r"● child (.|\n)*● parent ")
            await pilot.press("slash", *"par")
            await shows(pilot, r"● parent ")
            assert "● child" not in seen(pilot)
            await pilot.press("escape")
            await shows(pilot, r"● child ")

    asyncio.run(story())


def test_turns_are_shown_with_their_reasons_and_aborted_after_a_confirmation(
    server: Server, http: httpx.Client
) -> None:
    async def story() -> None:
        for name in ("busy", "later"):
            http.post("/v1/sessions", json={"id": name})
        with http.stream("POST", "/v1/sessions/busy/turns", json=ENDLESS) as answer:
            told = events(answer)
            next(told)
            with server.client() as other, other.stream("POST", "/v1/sessions/later/turns", json=ENDLESS):
                async with watching(server.url) as pilot:
                    await pilot.press("2")
                    await shows(pilot, r"● busy +.*━ +decode [\d,]+ of 1,900, [\d.]+/s")
                    await shows(pilot, r"● later +.*─ +queued every row is taken")
                    await pilot.press("1")
                    await choose(pilot, "busy")
                    await shows(pilot, r"● busy +decode .* [1-9]\d*")
                    await pilot.press("a")
                    await shows(pilot, r"Abort the open turn of busy\?")
                    await pilot.press("n")
                    await shows(pilot, r"● busy +decode")
                    await pilot.press("a")
                    await shows(pilot, r"Abort the open turn of busy\?")
                    await pilot.press("y")
                    await shows(pilot, r"● busy +idle")
                    assert list(told)[-1][0] == "aborted"
                    await pilot.press("2")
                    await shows(pilot, r"● busy +.*━ .*ended")

    asyncio.run(story())


def test_a_session_is_parked_and_closed(server: Server, family: httpx.Client) -> None:
    async def story() -> None:
        async with watching(server.url) as pilot:
            await choose(pilot, "parent")
            await pilot.press("p")
            await shows(pilot, r"Park parent\?")
            await pilot.press("y")
            await shows(pilot, r"● parent +parked +0 ")
            assert family.get("/v1/sessions/parent").json()["computed"] == 0
            await shows(pilot, r"host 1, [\d.]+ KiB")
            await pilot.press("a")
            await shows(pilot, r"Abort")
            await pilot.press("y")
            await shows(pilot, r"has\s+no\s+open")
            await pilot.press("c")
            await shows(pilot, r"Close parent\? Its 2 turns are gone then")
            await pilot.press("y")
            await shows(pilot, r"no session is open")
            assert family.get("/v1/sessions/parent").status_code == 404

    asyncio.run(story())


def test_the_memory_is_shown_with_those_who_hold_it(server: Server, family: httpx.Client) -> None:
    async def story() -> None:
        async with watching(server.url) as pilot:
            await pilot.press("3")
            await shows(pilot, r"● parent \d+ +● child \d+")
            assert {"█", "▞", "·"} <= set(seen(pilot))

    asyncio.run(story())


def test_it_finds_the_server_again_after_a_restart(tmp_path: Path) -> None:
    arguments = ("--model", "witness", "--port", str(free_port()), "--journal", str(tmp_path / "journal"))

    async def story() -> None:
        with serving(*arguments) as first, first.client() as http:
            http.post("/v1/sessions", json={"id": "lasting"})
            turn(http, "/v1/sessions/lasting", input=[1] * 60)
            watched = watching(first.url)
            pilot = await watched.__aenter__()
            await shows(pilot, r"● lasting +idle +\d+ +- +64 ")
            first.kill_all()
            await shows(pilot, r"no connection: ")
        with serving(*arguments) as second, second.client() as http:
            await shows(pilot, r" live ")
            turn(http, "/v1/sessions/lasting", input=[2] * 10)
            await shows(pilot, r"● lasting +idle +\d+ +- +78 ")
            await watched.__aexit__(None, None, None)

    asyncio.run(story())


def test_a_key_shows_what_its_tenant_has_and_a_wrong_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)

    async def story(url: str) -> None:
        async with watching(url, "ann-secret") as pilot:
            await shows(pilot, r"as ann")
            await shows(pilot, r"● of-ann ")
            assert "of-bob" not in seen(pilot)
            assert " free = " not in seen(pilot)

    with serving("--model", "witness", "--keys", str(tmp_path / "keys.toml")) as server:
        for name in ("ann", "bob"):
            key: dict[str, Any] = {"headers": {"authorization": f"Bearer {name}-secret"}}
            httpx.post(f"{server.url}/v1/sessions", json={"id": f"of-{name}"}, **key, timeout=60)
        asyncio.run(story(server.url))
        for given in ({}, {"TENUTO_API_KEY": "wrong"}):
            done = run_inside("top", env={"TENUTO_URL": server.url, **given})
            assert (done.returncode, done.stdout) == (1, "")
            assert re.fullmatch(r"tenuto: .*key.*\n", done.stderr)


def test_without_a_server_or_the_extra_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_inside("top", "--url", f"http://127.0.0.1:{free_port()}")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"tenuto: there is no connection to the server: .*\n", done.stderr)
    assert run_inside("top", "--url", "nonsense").stderr.startswith("tenuto: 'nonsense' is not the address of a server")
    monkeypatch.setattr(run, "find_spec", lambda _: None)
    done = run_inside("top")
    assert (done.returncode, done.stderr) == (
        1,
        'tenuto: the terminal\'s map needs textual: pip install "tenuto[top]"\n',
    )


def test_it_runs_on_a_terminal(witness: Server) -> None:
    with Terminal([TENUTO, "top", "--url", witness.url]) as terminal:
        terminal.wait_for("tenuto top")
        assert terminal.quit_by("q") == 0
