"""Replies arrive as they were sent, and errors with all that their receiver may know."""

from __future__ import annotations

import msgspec

from tenuto.base.errors import EngineStopped
from tenuto.base.sampling import Candidate, TokenLogprob
from tenuto.base.turns import Delta, EndReason, TurnResult, Usage
from tenuto.base.wire.replies import AnyReply, Refusal, Stopped, Updates, error_of, refusal_of


def arrived(sent: AnyReply) -> AnyReply:
    """Returns the reply as its receiver decodes it."""
    decoded: AnyReply = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=AnyReply)
    return decoded


def test_deltas_are_sent_unchanged() -> None:
    entry = TokenLogprob(5, -0.5, (Candidate(6, -0.25, b"\xc3"),), b"x")
    result = TurnResult(EndReason.STOP, True, 2, 1, Usage(3, 1, 1, 4), 9, 50, "end")
    updates = Updates(updates=[(3, Delta((5,), "x", 1, result, (entry,), (None, entry))), (4, Delta())])
    assert arrived(updates) == updates


def test_an_error_arrives_with_its_param_and_a_detail_that_only_its_text_has() -> None:
    sent = EngineStopped("the engine stopped", param="model", detail="InvariantError: turn 3 of s")
    refusal = arrived(refusal_of(7, sent))
    assert isinstance(refusal, Refusal)
    came = error_of(refusal)
    assert (refusal.call, type(came), came.message, came.param) == (7, EngineStopped, "the engine stopped", "model")
    assert str(came) == str(sent) == "the engine stopped: InvariantError: turn 3 of s"
    stopped = arrived(Stopped(reason="the engine stopped", detail="InvariantError: turn 3 of s"))
    assert isinstance(stopped, Stopped)
    assert str(stopped.error()) == str(sent)
