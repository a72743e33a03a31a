"""Messages sent by an engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue

from tenuto.base.wire.replies import AnyReply
from tenuto.runtime.outbox import Outbox
from tenuto.runtime.texts import Texts


class Work:
    """Work that can be weakly referenced."""

    def __call__(self) -> None:
        """Does nothing."""


class Waiting(SimpleQueue[Callable[[], None] | None]):
    """A queue that notes at every `get` whether the previous work has been freed."""

    def __init__(self, before: weakref.ref[Work]) -> None:
        self.gone: list[bool] = []
        self._before = before

    def get(self, block: bool = True, timeout: float | None = None) -> Callable[[], None] | None:
        self.gone.append(self._before() is None)
        return super().get(block, timeout)


def test_a_message_is_freed_when_it_is_sent_and_not_when_the_next_one_is() -> None:
    def ignore(_: AnyReply) -> None:
        """Sends nothing."""

    outbox, work = Outbox(ignore, Texts(None)), Work()
    waiting = Waiting(weakref.ref(work))
    waiting.put(work)
    waiting.put(None)
    del work
    outbox.close()
    outbox._waiting = waiting
    outbox._run()
    assert waiting.gone == [False, True]
