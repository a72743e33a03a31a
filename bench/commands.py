"""The engine thread's time per command beside 10,000 idle sessions: `python -m bench.commands`.

Sixteen turns decode, and one command runs before every step, as if a client repeated it as fast as possible. A command
that lists or counts things should cost time for what it returns, not for everything that exists.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from bench.engine_step import Bench, make
from tenuto.base.config import Limits
from tenuto.base.errors import LimitReached
from tenuto.base.options import Policy
from tenuto.base.wire.messages import GetStats, ListSessions, OpenSession
from tenuto.base.wire.request import Request
from tenuto.engine.thread.dispatcher import Dispatcher
from tenuto.engine.thread.rendering import Renderer

PARKED = 10_000
STEPS = 300


def commands(bench: Bench) -> dict[str, Callable[[], object]]:
    """Returns the commands to run before every step, by name."""
    engine = bench.engine
    dispatcher = Dispatcher(engine, Renderer(None, None))
    units = engine.registry.use("").units

    def execute(command: Request[object]) -> Callable[[], object]:
        return lambda: dispatcher.execute(command)

    def refused() -> None:
        try:
            dispatcher.execute(OpenSession(session="more", policy=Policy(), limits=Limits(units=0)))
        except LimitReached:
            return
        raise AssertionError("a tenant with units has more than it is allowed")

    def one_leaves() -> None:
        nonlocal units
        units -= 1
        dispatcher.execute(OpenSession(session=None, policy=Policy(), limits=Limits(units=units)))

    return {
        "nothing": lambda: None,
        "statistics": execute(GetStats()),
        "a page of 1 session": execute(ListSessions(tenant="", limit=1)),
        "a page of 1, of another tenant": execute(ListSessions(tenant="other", limit=1)),
        "a page of 1 that runs": execute(ListSessions(tenant="", limit=1, state="running")),
        "a page of 100": execute(ListSessions(tenant="", limit=100, after="parked 5")),
        "a page of 1,000": execute(ListSessions(tenant="", limit=1000)),
        "refused: too many units": refused,
        "one session leaves for another": one_leaves,
        "an audit is asked for": lambda: None if engine.auditor.awaited else engine.ask_audit(lambda _: None),
        "a recount at one go": engine.audit,
    }


def main() -> None:
    """Prints the table."""
    bench = make(16, parked=PARKED, host_tier=10**9)
    idle = [session for session in bench.engine.registry if session.turn is None]
    bench.engine.sessions.leave_device(idle[::2])
    bench.stretch(50)
    gc.collect()
    gc.freeze()
    print(f"16 decodes beside {PARKED:,} idle sessions, half of them parked: ms of processor time but the witness's")
    print(f"{'before every step':<36}{'command p50':>12}{'p99':>9}{'step p50':>12}{'p99':>9}")
    for name, work in commands(bench).items():
        took, steps = [], []
        for _ in range(STEPS if name != "a recount at one go" else 30):
            began = time.thread_time_ns()
            work()
            took.append(time.thread_time_ns() - began)
            inside, began = bench.executor.worked, time.thread_time_ns()
            bench.engine.step()
            steps.append(time.thread_time_ns() - began - (bench.executor.worked - inside))
        figures = [sorted(times)[int(len(times) * share)] / 1e6 for times in (took, steps) for share in (0.5, 0.99)]
        print(f"{name:<36}{figures[0]:>12.3f}{figures[1]:>9.3f}{figures[2]:>12.3f}{figures[3]:>9.3f}")


if __name__ == "__main__":
    main()
