"""Masks of grammars are computed beside the steps, and turns whose masks take long hold up no others."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from tenuto.base.options import TurnParams
from tenuto.base.plan import Words
from tenuto.base.views import Transition
from tenuto.text.constraint import Constraint
from tenuto.text.masks import MaskRequest, MaskThreads, give_up
from tests.engine.ladder import ANY, WORDS, Ladder, allowed, climb, climbed
from tests.engine.stage import (
    Stage,
    continuation,
    count_from,
    every_overlap,
)


def test_a_step_begins_to_compute_before_its_masks_are_ready() -> None:
    """The executor receives the plan while the mask is still being computed."""
    known, masks = threading.Event(), MaskThreads()

    class Waiting(Ladder):
        def fill(self, words: Words) -> None:
            assert known.wait(60)
            super().fill(words)

    stage = Stage(masks=masks)
    stage.open()
    unknown: list[bool] = []
    submit = stage.executor.submit

    def submitting(plan) -> None:
        submit(plan)
        unknown.extend(not mask.allowed.done() for mask in plan.masks)
        known.set()

    stage.executor.submit = submitting  # type: ignore[method-assign]
    turn = climb(stage, count_from(1, 10), Waiting(5, 0, 6))
    stage.play()
    masks.close()
    assert unknown[0]
    assert list(turn.output) == climbed(count_from(1, 10), Ladder(5, 0, 6), 12)


def test_every_mask_is_computed_once_even_if_its_speed_is_reassessed_meanwhile() -> None:
    class Changing(Constraint):
        """Appears slow or fast in turn, at every look."""

        looked = 0

        @property
        def slow(self) -> bool:
            self.looked += 1
            return self.looked % 2 == self.odd

        @slow.setter
        def slow(self, value: bool) -> None:
            """Ignores what the threads measured."""

        odd = 0

    masks = MaskThreads()
    requests = []
    for odd in (0, 1, 0, 1):
        constraint = Changing(Ladder(5, 0, 8), WORDS)
        constraint.odd, constraint.looked = odd, 0
        requests.append(MaskRequest(constraint, (), Future()))
    masks.ask(requests)
    assert all(request.answer.result(60) is not None for request in requests)
    masks.close()


@every_overlap
def test_other_turns_continue_while_a_slow_mask_is_computed(overlap: int) -> None:
    go, masks = threading.Event(), MaskThreads()

    class Slow(Ladder):
        def fill(self, words: Words) -> None:
            if len(self.said) > 2:
                assert go.wait(60)
            super().fill(words)

    stage = Stage(masks=masks, overlap=overlap)
    for name in ("s", "other"):
        stage.open(name)
    constraint = Constraint(Slow(5, 0, 8), WORDS)
    constraint.slow = True
    params = TurnParams(max_new_tokens=12, grammar=ANY)
    turn = stage.engine.turns.submit("s", count_from(1, 10), params, None, constraint)
    other = stage.say("other", count_from(2, 10), 60)
    constraint.slow = True
    for _ in range(200):
        constraint.slow = True  # time is not measured here
        stage.step()
        if len(other.output) >= 40:
            break
    assert len(turn.output) <= 4
    assert len(other.output) >= 40
    go.set()
    stage.play()
    masks.close()
    assert list(turn.output) == climbed(count_from(1, 10), Ladder(5, 0, 8), 12)
    assert list(other.output) == continuation(count_from(2, 10), 60)


@every_overlap
def test_a_turn_with_slow_masks_ends_while_another_runs(overlap: int) -> None:
    stage = Stage(overlap=overlap, context_length=400)
    for name in ("s", "other"):
        stage.open(name)

    class Slow(Constraint):
        slow = property(lambda self: True, lambda self, value: None)

    ladder, params = Ladder(5, 0, 8), TurnParams(max_new_tokens=12, grammar=ANY)
    turn = stage.engine.turns.submit("s", count_from(1, 10), params, None, Slow(ladder, WORDS, allowed(ladder, 0)))
    other = stage.say("other", count_from(2, 10), 200)
    stage.until(lambda: turn.result is not None)
    assert other.result is None


def test_a_turn_with_slow_masks_runs_if_the_others_do_not_fit_memory() -> None:
    """Known fault: no turn could continue, so the one that lacked a page was preempted."""
    stage = Stage(units=6, context_length=24, token_budget=32)
    for name in ("s", "other"):
        stage.open(name)

    class Slow(Constraint):
        slow = property(lambda self: True, lambda self, value: None)
        ready = property(lambda self: not ladder.said)  # only the first mask is known in time

    ladder, params = Ladder(5, 0, 3), TurnParams(max_new_tokens=8, grammar=ANY)
    turn = stage.engine.turns.submit("s", count_from(1, 10), params, None, Slow(ladder, WORDS))
    other = stage.say("other", count_from(2, 10), 12)
    stage.play()
    assert stage.engine.transitions[Transition("preempt")] == 0
    assert list(turn.output) == climbed(count_from(1, 10), Ladder(5, 0, 3), 8)
    assert list(other.output) == continuation(count_from(2, 10), 12)


def test_a_finished_mask_is_not_cancelled() -> None:
    answer: Future[Words | None] = Future()
    answer.set_result(None)
    give_up(answer)
    assert answer.result() is None
