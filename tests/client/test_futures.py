from __future__ import annotations

from concurrent.futures import CancelledError, Future

import pytest

from tenuto.client.futures import Steps, chained


def test_steps_run_as_their_futures_complete_and_finally_return() -> None:
    first, second = Future[int](), Future[int]()

    def steps() -> Steps[int]:
        one = yield first
        other = yield second
        return one + other

    outcome = chained(steps())
    second.set_result(2)
    assert not outcome.done()
    first.set_result(1)
    assert outcome.result(0) == 3


def test_an_error_is_raised_where_it_is_awaited_and_can_be_handled_there() -> None:
    first, second = Future[int](), Future[int]()

    def steps() -> Steps[int]:
        with pytest.raises(KeyError):
            yield first
        yield second
        raise AssertionError("an unhandled error ends the steps")

    outcome = chained(steps())
    first.set_exception(KeyError())
    second.set_exception(ValueError("second"))
    with pytest.raises(ValueError, match="second"):
        outcome.result(0)


def test_an_error_of_the_first_step_is_the_outcomes() -> None:
    def fail() -> Future[int]:
        raise ValueError("at once")

    def steps() -> Steps[int]:
        yield fail()
        return 1

    with pytest.raises(ValueError, match="at once"):
        chained(steps()).result(0)


def test_cancelling_the_outcome_cancels_the_awaited_future() -> None:
    first, second = Future[int](), Future[int]()

    def steps() -> Steps[int]:
        yield first
        yield second
        return 1

    outcome = chained(steps())
    first.set_result(1)
    assert outcome.cancel()
    assert second.cancelled()
    with pytest.raises(CancelledError):
        outcome.result(0)


def test_steps_continue_after_a_future_that_cannot_be_cancelled() -> None:
    running, ended = Future[int](), list[int]()
    running.set_running_or_notify_cancel()

    def steps() -> Steps[None]:
        ended.append((yield running))

    assert chained(steps()).cancel()
    running.set_result(5)
    assert ended == [5]
