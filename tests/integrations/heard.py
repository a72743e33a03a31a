"""Checks of a session on a server after an answer was interrupted."""

from __future__ import annotations

from typing import Any

from tests.serve.server import Server

STORY = "Tell me a long story about the sea and about a ship."
QUESTION = "Wait a moment, please: what was the name of the ship in this story, and of its captain?"


def beginnings(text: str, step: int = 4) -> list[str]:
    """Returns what a recognizer hears while the text is spoken, some more words each time."""
    words = text.split()
    return [" ".join(words[:count]) for count in range(step, len(words), step)]


def turns_of(server: Server, session: str) -> list[dict[str, Any]]:
    """Returns the committed turns of a session."""
    with server.client() as http:
        turns: list[dict[str, Any]] = http.get(f"/v1/sessions/{session}/turns").raise_for_status().json()["data"]
        return turns


def open_sessions(server: Server) -> list[str]:
    with server.client() as http:
        return [session["id"] for session in http.get("/v1/sessions").raise_for_status().json()["data"]]
