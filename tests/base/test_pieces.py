"""Large requests are written in pieces."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.tools.definitions import ToolCall
from tenuto.base.turns import Message, TurnInput
from tenuto.base.wire.frames import frame
from tenuto.base.wire.messages import AbortTurn, Describe, StartTurn, Tokenize
from tenuto.base.wire.pieces import PIECE, in_pieces

ENCODER = msgspec.msgpack.Encoder()
LENGTHS = st.sampled_from([0, 1, 15, 16, PIECE - 40, PIECE - 1, PIECE, 3 * PIECE])
TEXTS = st.builds(lambda letter, length: letter * length, st.sampled_from("xé\u20ac\U0001f600"), LENGTHS)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["user", "assistant"]),
    TEXTS,
    st.lists(st.builds(ToolCall, TEXTS, st.just("{}"), TEXTS), max_size=1).map(tuple),
    reasoning=TEXTS,
)
INPUTS = TEXTS | st.lists(MESSAGES, max_size=3) | st.lists(st.integers(0, 9), max_size=3)


@given(INPUTS)
def test_the_pieces_of_a_request_add_up_to_the_whole(given_input: TurnInput) -> None:
    for request in (
        StartTurn(kind="turn", tenant="t", input=given_input, call=300),
        Tokenize(input=given_input),
        AbortTurn(tenant="t", session="s"),
        Describe(),
    ):
        assert b"".join(in_pieces(request, ENCODER)) == ENCODER.encode(request)


@pytest.mark.parametrize(
    "given_input",
    ["x" * 40 * PIECE, [Message("user", "x" * 3000)] * 1000, [Message("user", "é" * 40 * PIECE)]],
    ids=["text", "messages", "message"],
)
def test_no_piece_of_a_large_request_is_large(given_input: TurnInput) -> None:
    pieces = frame(*in_pieces(StartTurn(kind="turn", tenant="t", input=given_input), ENCODER))
    assert len(pieces) > 30
    assert max(map(len, pieces)) <= 2 * PIECE


def test_text_that_cannot_be_encoded_is_also_refused_in_pieces() -> None:
    with pytest.raises(UnicodeEncodeError):
        in_pieces(Tokenize(input="\ud800" * PIECE), ENCODER)
