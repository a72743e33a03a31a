"""The demonstration, shortened."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console

from tenuto import demo


def test_the_demo_shows_everything_it_promises(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "QUESTIONS", {name: questions[:3] for name, questions in demo.QUESTIONS.items()})
    monkeypatch.setattr(demo, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(demo, "LONG", 200)
    out = io.StringIO()
    pages = []

    class LookAtTheMap:
        """Takes the place of the wait for Ctrl-C."""

        def wait(self) -> None:
            found = re.search(r"(http://\S+/map)", out.getvalue())
            assert found is not None
            pages.append(httpx.get(found[1], timeout=60).raise_for_status().text)
            raise KeyboardInterrupt

    monkeypatch.setattr(demo, "threading", SimpleNamespace(Event=LookAtTheMap))
    demo.run_demo(console=Console(file=out, width=80), keep=True)
    assert "map.js" in pages[0]
    shown = out.getvalue()
    assert "\x1b" not in shown
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+) +(\d+) +[\d.]+ s +(\d+) +[\d.]+ s +[\d.]+ *$", shown, re.MULTILINE)
    assert len(rows) == 3
    for turn, context, new, computed, resent in (map(int, row) for row in rows):
        assert resent == context
        assert computed == new + (turn > 1)  # and the last token of the history
    assert "The first token was the same both ways in 9 of 9 turns." in shown
    assert re.search(r"\d+ of \d+ tokens kept", shown)
    assert re.search(r"[1-9]\d* pages are shared", shown)
    assert "From 3 turns" in shown
    assert "context_exceeded (HTTP 400): history and input have" in shown
    assert "The session is the same as before" in shown
    lines = " ".join(shown.split())  # lines wrap
    assert re.search(r"It is back after [\d.]+ s\. The session has \d+ tokens, the same as before the story", lines)
    costs = re.findall(r"(restored|recomputed): of a context of (\d+) tokens it computed (\d+) tokens before", lines)
    assert [name for name, _, _ in costs] == ["restored", "recomputed"]
    assert int(costs[0][1]) > 200
    assert int(costs[0][2]) < 40
    assert costs[1][1] == costs[1][2] == costs[0][1]
    assert len(re.findall("every unit accounted for", shown)) == 3  # before a server is killed or stopped, and after
