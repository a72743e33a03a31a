"""Processes of our own: with their standard input they end, or they are killed."""

from __future__ import annotations

import signal

import pytest

from tenuto.base.child import Child


def test_a_process_ends_with_its_input_and_answers_no_more() -> None:
    child = Child("json.tool")  # reads all of its input, which is no JSON
    child.end_input()
    with pytest.raises(EOFError):
        child.answer()
    assert child.read(1) == b""
    assert child.status() == 1
    child.close()


def test_a_killed_process_tells_by_which_signal() -> None:
    child = Child("json.tool")
    child.kill()
    assert child.status() == -signal.SIGKILL
    child.close()
