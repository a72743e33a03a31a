"""The deltas of a turn, joined, and trimmed after an abort."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.base.errors import InvalidRequest, TurnFailed
from tenuto.base.sampling import TokenLogprob
from tenuto.base.turns import (
    MAX_PIECES,
    AbortGate,
    Delta,
    EndReason,
    Transcript,
    TurnResult,
    Usage,
    check_keep,
    joined,
)


def ended(output_kept: int, *, committed: bool = True, reason: EndReason = EndReason.ABORT) -> TurnResult:
    return TurnResult(reason, committed, 1, output_kept, Usage(3, 0, 9, 12), 20, 100)


def delta(*tokens: int, text: str, delivered: int, result: TurnResult | None = None) -> Delta:
    return Delta(tokens, text, delivered, result, tuple(TokenLogprob(token, -1.0) for token in tokens))


def kept(held: list[Delta], *, delivered: int) -> Delta | None:
    """Returns the delta that passes the gate when `held` arrive after an abort, with two tokens before it."""
    gate = AbortGate()
    assert gate.take(delta(1, 2, text="ab", delivered=delivered)) is not None
    gate.begin_abort()
    assert [gate.take(each) for each in held[:-1]] == [None] * (len(held) - 1)
    return gate.take(held[-1])


def test_deltas_can_be_joined() -> None:
    first, last = delta(1, 2, text="ab", delivered=1), delta(3, text="c", delivered=3, result=ended(3))
    both = joined([first, last])
    assert (both.tokens, both.text, both.delivered, both.result) == ((1, 2, 3), "abc", 3, last.result)
    assert [entry.token for entry in both.logprobs] == [1, 2, 3]
    assert joined([first]) is first
    assert joined([]) == Delta()


def test_deltas_after_an_abort_are_kept_as_far_as_they_were_committed() -> None:
    held = [delta(3, text="c", delivered=3), delta(4, 5, text="de", delivered=5, result=ended(4))]
    left = kept(held, delivered=2)
    assert left is not None
    assert (left.tokens, left.text, left.delivered, left.result) == ((3, 4), "c", 3, held[-1].result)
    assert [entry.token for entry in left.logprobs] == [3, 4]


@pytest.mark.parametrize(
    "result", [ended(0, committed=False), ended(1), ended(0, committed=False, reason=EndReason.DEADLINE)]
)
def test_nothing_more_is_kept_of_a_turn_that_was_rolled_back_or_cut_before(result: TurnResult) -> None:
    held = [delta(3, text="c", delivered=3), delta(4, text="d", delivered=4, result=result)]
    assert kept(held, delivered=1) == Delta(delivered=1, result=result)


def test_a_turn_that_ended_before_its_abort_took_effect_is_kept_whole() -> None:
    held = [delta(3, text="c", delivered=3), delta(4, text="d", delivered=4, result=ended(4, reason=EndReason.STOP))]
    assert kept(held, delivered=2) == joined(held)


def test_a_transcript_waits_for_the_result_once_an_abort_has_begun() -> None:
    transcript = Transcript()
    transcript.take(delta(1, 2, text="ab", delivered=1))
    assert transcript.tokens_to_keep("delivered") == 1
    assert (transcript.tokens_to_keep("all"), transcript.tokens_to_keep(None)) == ("all", None)
    transcript.begin_abort()
    assert transcript.take(delta(3, text="c", delivered=3)) == Delta(delivered=1)
    assert (transcript.text, transcript.token_ids, transcript.ended) == ("ab", [1, 2], False)
    transcript.take(delta(4, text="d", delivered=4, result=ended(3)))
    assert (transcript.text, transcript.token_ids, transcript.ended) == ("abc", [1, 2, 3], True)


def test_a_transcript_raises_its_turns_error_at_every_use() -> None:
    transcript = Transcript()
    for ask in (lambda: transcript.take(TurnFailed("no")), lambda: transcript.ended):
        with pytest.raises(TurnFailed):
            ask()


@pytest.mark.parametrize("wrong", ["none", "most", -1, 1.5, True, ["all"], 2**41])
def test_an_invalid_keep_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="allowed") as refused:
        check_keep(wrong)
    assert refused.value.param == "keep"


def test_a_transcript_of_many_pieces_has_all_their_text() -> None:
    transcript = Transcript()
    for n in range(3 * MAX_PIECES):
        transcript.take(delta(n, text=f"{n} ", delivered=n + 1))
    assert transcript.text == "".join(f"{n} " for n in range(3 * MAX_PIECES))
    assert len(transcript._pieces) <= MAX_PIECES
