"""Stop ids end turns, and results name them."""

from __future__ import annotations

from tenuto.base.options import TurnParams
from tests.engine.stage import Stage, continuation, count_from, every_overlap


@every_overlap
def test_the_result_names_the_stop_id_that_ended_the_turn(overlap: int) -> None:
    stage = Stage(overlap=overlap)
    stage.open()
    said = continuation(count_from(0, 5), 8)
    for stop_ids, expected in (((), None), ((said[3], 1), said[3])):
        turn = stage.engine.turns.submit("s", count_from(0, 5), TurnParams(max_new_tokens=8, stop_ids=stop_ids))
        stage.play()
        assert turn.result is not None
        assert turn.result.stop == expected
        stage.engine.sessions.rewind("s", position=0)


@every_overlap
def test_a_guessed_stop_id_ends_the_turn_and_is_named(overlap: int) -> None:
    said = continuation(count_from(0, 5), 8)
    stage = Stage(overlap=overlap, lookahead=4, guess=lambda turn, most: said[len(turn.output) :][:most])
    stage.open()
    turn = stage.engine.turns.submit(
        "s", count_from(0, 5), TurnParams(max_new_tokens=8, stop_ids=(said[4],), logprobs=0)
    )
    stage.play()
    assert turn.result is not None
    assert turn.result.stop == said[4]
    assert [entry.token for entry in turn.output_logprobs] == said[:5]
