"""`python -m tests.sim.planted N`: one process with what `proof` calls number N planted, until a world fails."""

from __future__ import annotations

import argparse
import logging
import resource
import signal
import sys

from tests.sim import proof

WORLD_SECONDS = 20
"""Processor time of one world, far more than any takes: a step that does not end has been found, too."""


MAX_MEMORY = 3 << 30
"""Bytes: what does not end may also grow."""


class EndlessStepError(Exception):
    """The engine does not come back."""


def _give_up(*_: object) -> None:
    raise EndlessStepError(f"a world took {WORLD_SECONDS} seconds")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.planted", description=__doc__)
    parser.add_argument("number", type=int)
    parser.add_argument("--steps", type=int, default=proof.MAX_STEPS)
    parser.add_argument("--first", type=int, nargs="*", default=())
    parser.add_argument("--past", nargs="*", default=())
    arguments = parser.parse_args()
    proof.plant(arguments.number)
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    signal.signal(signal.SIGVTALRM, _give_up)
    from tests.sim.run import any_world, run_world  # noqa: PLC0415 - the core must be loaded with it

    steps, others = 0, iter(range(10**9))
    first = iter(arguments.first)
    while steps < arguments.steps:
        seed = next(first, None)
        seed = next(others) if seed is None else seed
        signal.setitimer(signal.ITIMER_VIRTUAL, WORLD_SECONDS, 1)
        summary = run_world(any_world(seed), proof.WORLD_STEPS, arguments.past)
        steps += summary.steps
        for report in summary.failures.values():
            print(f"{seed} {steps} {report.split(' after ', 1)[0]}")
            return 0
    print("survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
