"""Chains of futures as one future, for synchronous and asynchronous callers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[Future[Any], Any, T]
"""A generator that yields futures, receives their results or errors, and returns a `T`."""


def mapped(future: Future[Any], change: Callable[[Any], T]) -> Future[T]:
    """Returns a future for `change` of the result of `future`."""

    def steps() -> Steps[T]:
        return change((yield future))

    return chained(steps())


def chained(steps: Steps[T]) -> Future[T]:
    """Returns a future for the return value of `steps`, which continue in the thread that completes each future.
    Cancelling it cancels the future that the steps wait for."""
    outcome: Future[T] = Future()
    awaited: Future[Any] | None = None

    def go_on(done: Future[Any] | None) -> None:
        nonlocal awaited
        try:
            error = done.exception() if done is not None else None
            if error is not None:
                awaited = steps.throw(error)
            else:
                awaited = steps.send(done.result() if done is not None else None)
        except StopIteration as end:
            if outcome.set_running_or_notify_cancel():
                outcome.set_result(end.value)
        except BaseException as error:  # noqa: BLE001 - passed on to the outcome
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(error)
        else:
            awaited.add_done_callback(go_on)

    def give_up(done: Future[T]) -> None:
        if done.cancelled() and awaited is not None:
            awaited.cancel()

    outcome.add_done_callback(give_up)
    go_on(None)
    return outcome
