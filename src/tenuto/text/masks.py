"""Computes the masks of turns with a grammar while the steps that sample from them run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from tenuto.base.plan import Words
from tenuto.text.constraint import Constraint


class MaskRequest(NamedTuple):
    """A request for `constraint.masks(guesses)`; `answer` receives the result."""

    constraint: Constraint
    guesses: Sequence[int]
    answer: Future[Words | None]

    def carry_out(self) -> None:
        """Computes the masks, unless `answer` has been cancelled."""
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self.constraint.masks(self.guesses))
            except BaseException as error:  # noqa: BLE001 - raised in the step that waits for the answer
                self.answer.set_exception(error)


def give_up(answer: Future[Words | None]) -> None:
    """Answers None to a pending request whose turn has left its row, so that the step need not wait; the token sampled
    in that row is dropped."""
    if not answer.done() and answer.set_running_or_notify_cancel():
        answer.set_result(None)


class Masks(Protocol):
    """Carries out requests for masks."""

    def ask(self, requests: Sequence[MaskRequest]) -> None:
        """Carries out the requests, at once or in other threads."""

    def close(self) -> None:
        """Finishes pending requests."""


class MasksAtOnce:
    """Carries out requests at once, in the calling thread."""

    def ask(self, requests: Sequence[MaskRequest]) -> None:
        for request in requests:
            request.carry_out()

    def close(self) -> None:
        """Does nothing; no request is pending."""


class MaskThreads:
    """Carries out requests in two threads. The second one is for slow constraints, so that others need not wait for
    these."""

    def __init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"tenuto-{name}") for name in ("masks", "slow-masks")]

    def ask(self, requests: Sequence[MaskRequest]) -> None:
        # The threads change `slow`; it is read once, so that exactly one of them gets each request.
        slow = [request.constraint.slow for request in requests]
        for number, thread in enumerate(self._threads):
            mine = [request for request, late in zip(requests, slow, strict=True) if late is bool(number)]
            if mine:
                thread.submit(MasksAtOnce().ask, mine)

    def close(self) -> None:
        """Finishes pending requests and ends the threads."""
        for thread in self._threads:
            thread.shutdown()
