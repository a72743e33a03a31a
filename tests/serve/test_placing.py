"""System messages anywhere in a conversation, for models whose templates allow them there or not."""

from __future__ import annotations

import pytest

from tenuto.base.tools.definitions import ModelHabits
from tenuto.base.turns import Message
from tenuto.serve.shared.answer_headers import LEFT_UNDONE, telling
from tenuto.serve.shared.placing import placed


def conversation(text: str) -> list[Message]:
    """Parses `s:a u:b` to a system message with text a and a user message with text b."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [Message(roles[word[0]], word[2:].replace("+", "\n\n")) for word in text.split()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("u:1", "u:1"),
        ("s:1 u:2 a:3 u:4", "s:1 u:2 a:3 u:4"),
        ("s:1 s:2 u:3", "s:1+2 u:3"),
        ("u:1 s:2", "u:1+2"),
        ("u:1 s:2 u:3", "u:1+2 u:3"),
        ("u:1 a:2 s:3 s:4 u:5", "u:1 a:2 u:3+4+5"),
        ("u:1 s:2 a:3 u:4", "u:1+2 a:3 u:4"),
        ("u:1 a:2 t:3 s:4", "u:1 a:2 t:3 u:4"),
        ("s:1 s:2", "s:1+2"),
    ],
)
def test_a_late_system_message_joins_the_users_where_the_template_has_no_place_for_it(
    given: str, expected: str
) -> None:
    assert placed(conversation(given), ModelHabits(late_system=False)) == conversation(expected)
    assert placed(conversation(given), ModelHabits(late_system=True)) == conversation(given)


def test_only_a_message_whose_role_changed_is_named() -> None:
    for given, names in (("s:1 s:2 u:3", None), ("u:1 s:2", "messages.role.system")):
        with telling() as headers:
            placed(conversation(given), ModelHabits(late_system=False))
        assert headers.get(LEFT_UNDONE) == names
