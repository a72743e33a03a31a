"""Ctrl-C at the prompt of `tenuto chat`."""

from __future__ import annotations

import builtins

import pytest

from tenuto.cli.chat import LATE_SECONDS, read_lines


def lines_read(monkeypatch: pytest.MonkeyPatch, keys: list[tuple[float, str | None]]) -> list[str]:
    """Returns the lines that the chat reads. `keys`: the seconds at which each line, or Ctrl-C (None), is typed."""
    now, waiting = 0.0, iter(keys)

    def typed(_prompt: str) -> str:
        nonlocal now
        now, line = next(waiting, (now, ""))
        if line is None:
            raise KeyboardInterrupt
        if not line:
            raise EOFError
        return line

    monkeypatch.setattr(builtins, "input", typed)
    return list(read_lines(lambda: "1> ", prompted=True, clock=lambda: now))


def test_ctrl_c_twice_in_a_row_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_read(monkeypatch, [(1, "a"), (9, None), (9.1, "b"), (20, None), (20.1, None), (21, "c")]) == ["a", "b"]


def test_ctrl_c_just_too_late_for_an_answer_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    late = 1 + LATE_SECONDS / 2
    assert lines_read(monkeypatch, [(1, "a"), (late, None), (late, None), (3, None), (4, "b")]) == ["a", "b"]
