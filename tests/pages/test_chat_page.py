"""The chat page, in a browser, with the default model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.eventually import eventually
from tests.pages.accessible import faults
from tests.serve.server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Page


def ask(page: Page, text: str) -> None:
    """Sends a message, and waits until it is shown, whose answer may have ended by then."""
    page.get_by_label("Your message").fill(text)
    turns = page.locator(".turn")
    before = turns.count()
    page.keyboard.press("Enter")
    eventually(lambda: turns.count() == before + 1)


def answered(page: Page) -> None:
    page.get_by_role("button", name="Send").wait_for(timeout=60_000)


@pytest.fixture
def chat(page: Page, smollm2_server: Server) -> Page:
    page.goto(smollm2_server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens of an answer").fill("24")
    page.get_by_role("button", name="Save").click()
    return page


def sessions(server: Server) -> list[dict[str, Any]]:
    with server.client() as http:
        found: list[dict[str, Any]] = http.get("/v1/sessions").json()["data"]
    return [each for each in found if each["metadata"].get("page") == "chat"]


def texts(server: Server, session: str) -> list[str]:
    with server.client() as http:
        return [each["output_text"] for each in http.get(f"/v1/sessions/{session}/turns").json()["data"]]


def test_a_conversation_is_a_session_and_an_edited_message_a_fork(chat: Page, smollm2_server: Server) -> None:
    ask(chat, "Name the capital of France.")
    answered(chat)
    first = chat.get_by_label("Turn 1")
    assert "Paris" in first.inner_text()
    assert re.search(r"first token \d+ ms", first.inner_text())
    ask(chat, "And of Italy?")
    answered(chat)
    second = chat.get_by_label("Turn 2")
    assert "Rome" in second.inner_text()
    cached, prompt = map(int, re.search(r"(\d+) of (\d+) cached", second.inner_text()).groups())  # type: ignore[union-attr]
    (session,) = sessions(smollm2_server)
    assert 0 < cached < prompt
    second.get_by_role("button", name="Edit").click()
    chat.get_by_label("The message").fill("And of Spain?")
    chat.get_by_role("button", name="Ask on a fork").click()
    eventually(lambda: "Madrid" in second.inner_text() and "cached" in second.inner_text())
    assert "2 of 2" in second.inner_text()
    (fork,) = [each for each in sessions(smollm2_server) if each["id"] != session["id"]]
    assert [len(texts(smollm2_server, each["id"])) for each in (session, fork)] == [2, 2]
    second.get_by_role("button", name="Previous branch").click()
    eventually(lambda: "Rome" in second.inner_text())
    ask(chat, "Thank you.")
    answered(chat)
    assert len(texts(smollm2_server, session["id"])) == 3
    chat.reload()
    eventually(lambda: "Rome" in chat.get_by_label("Turn 2").inner_text())
    assert "Thank you." in chat.get_by_label("Turn 3").inner_text()
    chat.get_by_role("button", name=re.compile("^Close Name the")).click()
    eventually(lambda: not sessions(smollm2_server))


def test_an_interrupted_answer_is_kept_as_far_as_it_was_shown(chat: Page, smollm2_server: Server) -> None:
    chat.get_by_role("button", name="Settings").click()
    chat.get_by_label("Most tokens of an answer").fill("1500")
    chat.get_by_role("button", name="Save").click()
    ask(chat, "Tell me a long story about tea.")
    answer = chat.locator(".answer")
    eventually(lambda: len(answer.inner_text()) > 60)
    chat.get_by_role("button", name="Interrupt").click()
    answered(chat)
    assert "interrupted; this much is kept" in answer.inner_text()
    (session,) = sessions(smollm2_server)
    (kept,) = texts(smollm2_server, session["id"])
    shown = answer.locator("p").all_inner_texts()
    assert "".join("".join(shown).split()) == "".join(kept.split())
    ask(chat, "Go on.")
    chat.keyboard.press("Escape")
    answered(chat)
    assert next(each["turns"] for each in sessions(smollm2_server)) in (1, 2)  # it may not have begun
    chat.get_by_role("button", name=re.compile("^Close Tell me")).click()
    eventually(lambda: not sessions(smollm2_server))


def test_axe_finds_no_serious_fault(chat: Page, smollm2_server: Server) -> None:
    assert faults(chat) == []
    ask(chat, "Say `yes`.")
    answered(chat)
    chat.emulate_media(color_scheme="light")
    assert faults(chat) == []
    chat.emulate_media(color_scheme="dark")
    assert faults(chat) == []
    chat.set_viewport_size({"width": 390, "height": 800})
    assert faults(chat) == []
    wide: int = chat.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390
    chat.get_by_role("button", name=re.compile("^Close Say")).click()
    eventually(lambda: not sessions(smollm2_server))
