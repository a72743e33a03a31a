"""Large requests are written in pieces."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.tools.definitions import ToolCall
from tenuto.base.turns import Message, TurnInput
from tenuto.base.wire.between import Put
from tenuto.base.wire.fleet_messages import PutMove
from tenuto.base.wire.frames import frame
from tenuto.base.wire.messages import AbortTurn, Describe, StartTurn, Tokenize
from tenuto.base.wire.moves import StatePiece
from tenuto.base.wire.pieces import PIECE, in_pieces
from tenuto.base.wire.replies import Answer

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


@pytest.mark.parametrize("size", [0, PIECE - 1, PIECE, 40 * PIECE])
def test_state_is_not_copied(size: int) -> None:
    piece = StatePiece.of(1, 300, np.full((2, size), 7, np.uint8)).summed(max(size, 1))
    answer = Answer(call=7, value=msgspec.Raw(ENCODER.encode([piece])))
    for message in (Put(move="m", piece=piece), PutMove(call=5, move="m", piece=piece), answer):
        pieces = in_pieces(message, ENCODER)
        assert b"".join(pieces) == ENCODER.encode(message)
        given = answer.value if message is answer else piece.data
        shared = [part for part in pieces if isinstance(part, memoryview) and part.obj is memoryview(given).obj]
        assert len(shared) == (len(memoryview(given)) >= PIECE)


def test_text_that_cannot_be_encoded_is_also_refused_in_pieces() -> None:
    with pytest.raises(UnicodeEncodeError):
        in_pieces(Tokenize(input="\ud800" * PIECE), ENCODER)
