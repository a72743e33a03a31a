"""Stories about the streams of turns that move notice slips in the code of these streams, planted one at a time."""

from __future__ import annotations

from tests.sim.planted import Job, look_for_all
from tests.sim.slips import Slip

MOVED = "tests/serve/test_moved_streams.py::test_"

SLIPS = {
    Slip("serve.shared.live_turn", "Unsaid(tokens - start[0], ", "Unsaid(tokens - start[0] + 1, "): (
        "a_turn_that_does_not_come_back_after_all_is_followed_where_it_is"
    ),
    Slip("serve.shared.live_turn", "return self.turn.source is self", "return True"): (
        "what_an_engine_tells_of_a_turn_that_has_moved_is_not_said"
    ),
    Slip("serve.shared.live_turn", "            self.deliver(more)\n", "            pass\n"): (
        "a_turn_that_comes_back_says_nothing_twice_although_its_old_relay_is_still_being_read"
    ),
    Slip("serve.shared.live_turn", "(len(stream.said.tokens) - tokens, ", "(len(stream.said.tokens), "): (
        "a_stream_ahead_of_its_engine_skips_what_it_has_also_after_the_next_move"
    ),
    Slip("serve.shared.live_turn", "joined([*self.deltas, *self._gate.held])", "joined(self.deltas)"): (
        "what_is_held_back_since_an_abort_began_moves_with_the_stream"
    ),
    Slip("serve.shared.turns", "if lost is not None and turn.source", "if lost is None and turn.source"): (
        "the_error_that_ends_a_turn_while_it_moves_is_told_if_the_move_fails"
    ),
    Slip("serve.shared.turns", "            turn.lost = news  # kept", "            pass  # kept"): (
        "the_error_that_ends_a_turn_while_it_moves_is_told_if_the_move_fails"
    ),
    Slip(
        "serve.shared.turns",
        "if turn.elsewhere is not None and isinstance(news",
        "if turn.elsewhere is None and isinstance(news",
    ): ("a_turn_that_its_engine_has_dropped_for_its_move_goes_on"),
    Slip(
        "serve.shared.turns", "turn.readers > turn.followers[follower]", "turn.readers > sum(turn.followers.values())"
    ): ("a_turn_goes_on_for_a_replica_that_relays_it_when_another_one_has_no_readers_any_more"),
    Slip("serve.fleet.moving", "elif turn is None or not accepted:", "elif turn is None:"): (
        "a_stream_is_handed_over_with_all_that_the_engine_has_told"
    ),
    Slip("serve.fleet.moving", "ahead=turn.source.ahead", "ahead=(0, 0)"): (
        "a_stream_ahead_of_its_engine_skips_what_it_has_also_after_the_next_move"
    ),
    Slip(
        "serve.fleet.moving",
        "                self._relays.end(turn)\n                self._edge.turns.lose(turn",
        "                self._edge.turns.lose(turn",
    ): ("a_turn_goes_on_for_readers_at_a_replica_through_which_it_has_passed"),
    Slip("serve.fleet.moving", "            self._edge.turns.moved(turn)\n", "            pass\n"): (
        "a_turn_that_waits_for_a_session_that_moves_is_sent_after_it"
    ),
    Slip(
        "serve.fleet.moving",
        "            self._edge.turns.queues.refuse(waiting, Misdirected(MOVED))\n",
        "            pass\n",
    ): ("a_turn_that_waits_for_a_session_that_moves_is_sent_after_it"),
    Slip(
        "serve.fleet.moving",
        "                    self._edge.turns.stays(turn)\n                raise\n",
        "                    pass\n                raise\n",
    ): ("the_error_that_ends_a_turn_while_it_moves_is_told_if_the_move_fails"),
    Slip("serve.fleet.relays", "        self._turns.lose(turn, error)\n", "        pass\n"): (
        "a_turn_that_nobody_tells_about_any_more_ends"
    ),
    Slip("serve.fleet.relays", 'self._turns.lose(turn, TenutoError("the server failed; its log says why"))', "pass"): (
        "a_relay_that_fails_unexpectedly_ends_its_turn"
    ),
    Slip("serve.fleet.relays", "teller = self._tellers.get(turn) if unread else None", "teller = None"): (
        "a_turn_that_has_passed_through_a_replica_ends_with_its_last_reader"
    ),
    Slip("serve.fleet.receiving", "self._fleet.relays.begin(turn)", "pass"): (
        "a_turn_that_does_not_come_back_after_all_is_followed_where_it_is"
    ),
}
"""The slips, each with the story that notices it."""


def test_a_story_notices_each_slip() -> None:
    outcomes = look_for_all(Job(slip, 0, f"{MOVED}{story}") for slip, story in SLIPS.items())
    assert [str(slip) for slip, outcome in zip(SLIPS, outcomes, strict=True) if outcome.catcher is None] == []
