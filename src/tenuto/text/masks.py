"""Computes what may be sampled of turns with a grammar, while the steps that sample it compute."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from tenuto.base.plan import Words
from tenuto.text.constraint import Constraint


class MaskRequest(NamedTuple):
    """The masks wanted of a constraint: of its next token, and of those after each of `guesses`. `answer` gets what
    `Constraint.masks` returns."""

    constraint: Constraint
    guesses: Sequence[int]
    answer: Future[Words | None]

    def carry_out(self) -> None:
        """Unless nobody waits any more."""
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self.constraint.masks(self.guesses))
            except BaseException as error:  # noqa: BLE001 - told to the step that waits for it
                self.answer.set_exception(error)


def give_up(answer: Future[Words | None]) -> None:
    """Answer a request whose turn has left its row, unless it is answered: whatever is sampled is dropped."""
    if not answer.done() and answer.set_running_or_notify_cancel():
        answer.set_result(None)


class Masks(Protocol):
    """Carries out requests."""

    def ask(self, requests: Sequence[MaskRequest]) -> None:
        """Carry them out, now or in other threads."""
        ...

    def close(self) -> None:
        """Finish what has been asked."""
        ...


class MasksAtOnce:
    """Carries out requests where it is asked."""

    def ask(self, requests: Sequence[MaskRequest]) -> None:
        for request in requests:
            request.carry_out()

    def close(self) -> None:
        """Nothing is left to do."""


class MaskThreads:
    """Two threads: one for all, and one for constraints that are slow, which only those wait for."""

    def __init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"tenuto-{name}") for name in ("masks", "slow-masks")]

    def ask(self, requests: Sequence[MaskRequest]) -> None:
        # Read once: the threads change `slow`, and each request is carried out by one of them.
        slow = [request.constraint.slow for request in requests]
        for number, thread in enumerate(self._threads):
            mine = [request for request, late in zip(requests, slow, strict=True) if late is bool(number)]
            if mine:
                thread.submit(_carry_out, mine)

    def close(self) -> None:
        """Finish what has been asked."""
        for thread in self._threads:
            thread.shutdown()


def _carry_out(requests: Sequence[MaskRequest]) -> None:
    for request in requests:
        request.carry_out()
