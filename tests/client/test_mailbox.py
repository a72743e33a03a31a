from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from tenuto.base.turns import Delta
from tenuto.client.aio import Mailbox
from tenuto.client.transport import Event


def test_events_posted_before_the_loop_runs_arrive_in_order_with_one_wakeup(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        loop, wakings = asyncio.get_running_loop(), list[object]()
        wake = loop.call_soon_threadsafe

        def counted(work: Callable[[], object]) -> None:
            wakings.append(work)
            wake(work)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        mailbox, first, second = Mailbox(loop), asyncio.Queue[Event](), asyncio.Queue[Event]()
        deltas = [Delta((number,)) for number in range(6)]

        def post() -> None:
            for number, delta in enumerate(deltas[:4]):
                mailbox.post(second if number % 2 else first, delta)

        thread = threading.Thread(target=post)
        thread.start()
        thread.join()
        assert (len(wakings), first.qsize()) == (1, 0)
        assert [await first.get(), await first.get()] == [deltas[0], deltas[2]]
        assert [await second.get(), await second.get()] == [deltas[1], deltas[3]]
        for delta in deltas[4:]:
            mailbox.post(first, delta)
            assert await first.get() == delta
        assert len(wakings) == 3

    asyncio.run(story())


def test_posting_to_a_closed_loop_raises_every_time() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            mailbox.post(asyncio.Queue(), Delta())


def test_a_loop_closed_before_it_handled_an_event_raises_for_all_later_posts() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    mailbox.post(asyncio.Queue(), Delta())
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        mailbox.post(asyncio.Queue(), Delta())
