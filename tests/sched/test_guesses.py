"""How many guesses a step computes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tenuto.sched.guesses import NO_GUESSES, Guesses, NextStep, StepTimes, chosen_counts


def sure(count: int, chance: float = 1.0) -> Guesses:
    return Guesses(range(count), [chance] * count)


def learned(seconds: Callable[[int], float], rows: int, noise: float = 0.0) -> StepTimes:
    """Returns the times after a thousand steps, of which one with n further tokens takes `seconds(n)`."""
    times, rng = StepTimes(), Random(0)
    for _ in range(1000):
        further = rng.choice((0, 0, 1, 2, 3, 5, 7, 11, 15))
        times.note(rows, rows + further, seconds(further) * (1 + noise * rng.random()))
    return times


def test_guesses_that_cost_nothing_are_all_computed_and_those_that_cost_a_step_are_not() -> None:
    assert chosen_counts(NextStep(learned(lambda _: 0.01, 1), 1, 1, 1), [sure(15, 0.9)]) == [15]
    assert chosen_counts(NextStep(learned(lambda n: 0.01 * (1 + 2 * n), 1), 1, 1, 1), [sure(15, 0.9)]) == [0]


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_number_of_tokens_with_the_highest_rate_is_chosen(noise: float) -> None:
    def seconds(further: int) -> float:  # cheap up to 4 tokens, dear beyond
        return 0.01 + 0.004 * (further > 0) + 0.01 * max(0, further - 4)

    assert chosen_counts(NextStep(learned(seconds, 1, noise), 1, 1, 1), [sure(15, 0.95)])[0] in (3, 4, 5)


def test_the_likeliest_guesses_come_first() -> None:
    times = learned(lambda n: 0.01 + 0.002 * n, 4)
    counts = chosen_counts(NextStep(times, 4, 4, 4), [sure(8, 0.99), NO_GUESSES, sure(8, 0.3), sure(8, 0.9)])
    assert counts[0] >= counts[3] > counts[2] >= counts[1] == 0


def test_steps_that_get_slower_as_a_whole_change_no_choice() -> None:
    times, before = learned(lambda n: 0.01 + 0.001 * n, 1), learned(lambda n: 0.01 + 0.001 * n, 1)
    for _ in range(200):
        times.note(1, 1, 0.05)
    assert chosen_counts(NextStep(times, 1, 1, 1), [sure(15, 0.8)]) == chosen_counts(
        NextStep(before, 1, 1, 1), [sure(15, 0.8)]
    )


def test_guesses_beside_a_prompt_must_be_worth_the_time_that_they_add() -> None:
    """Beside 11 tokens of a prompt, four guesses would add a third to the step's time, and three tokens to two."""
    times = learned(lambda n: 0.01 + 0.01 * n, 2)
    for prompt in (0, 2, 11):
        assert chosen_counts(NextStep(times, 2, 2 + prompt, 2), [sure(4, 0.9), NO_GUESSES])[0] == 0


def test_guesses_beside_a_prompt_longer_than_any_measured_are_taken_for_cheap() -> None:
    times = learned(lambda n: 0.01 + 0.01 * n, 2)
    assert chosen_counts(NextStep(times, 2, 402, 1), [sure(4, 0.9), NO_GUESSES])[0] == 4


def test_guesses_that_depend_on_an_unknown_token_carry_its_chance() -> None:
    guesses = Guesses([5, 6, 7], [0.5, 0.8, 0.9]).after(1)
    assert list(guesses.tokens) == [6, 7]
    assert list(guesses.chances) == [0.4, 0.9]
    assert Guesses([5], [0.5]).after(1) is NO_GUESSES
