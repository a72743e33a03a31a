"""Worlds with something planted, in a process of its own, until one of them fails."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection

import pytest

from tests.sim.mutants import Mutant
from tests.sim.mutants import plant as plant_mutant
from tests.sim.slips import Slip
from tests.sim.slips import plant as plant_slip

Planted = Callable[[], AbstractContextManager[None]] | Slip | Mutant
"""A fault, which is planted on the loaded core, or what is planted when the core is loaded."""

WORLD_STEPS = 150
WORLD_SECONDS = 2
"""Processor time of one world, several times what the longest takes: a step that does not end has been found, too."""

MAX_MEMORY = 3 << 30
"""Bytes: what does not end may also grow."""

STORY_FAILED = "story failed"

FORKSERVER = multiprocessing.get_context("forkserver")
_FAULTS: list[object] = []


class EndlessStepError(Exception):
    """The engine does not come back."""


@dataclass(frozen=True)
class Job:
    """What to plant, for how many steps to look for it, in which seeds' worlds first, and rules that may be broken.
    With a `story`, a test's id, that is run instead of worlds."""

    planted: Planted
    most_steps: int
    first: Sequence[int] = ()
    past: Collection[str] = ()
    story: str | None = None


def look_for_all(jobs: Iterable[Job]) -> Iterator[str]:
    """What comes of each job, in order: seed, steps and the rule that was broken, "story failed", "survived", or what
    went wrong.

    Each has a process of its own. It is forked from one that has loaded all modules: to start Python anew would take
    longer than most of the worlds.
    """
    FORKSERVER.set_forkserver_preload(["tests.sim.proof", "tests.sim.run"])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(_look, jobs)


def is_caught(outcome: str) -> bool:
    """Whether what was planted has been noticed."""
    return outcome[:1].isdigit() or outcome == STORY_FAILED


def _look(job: Job) -> str:
    """One job in its process."""
    receiving, sending = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=_tell, args=(job, sending))
    process.start()
    sending.close()
    with receiving:
        try:
            outcome: str = receiving.recv()
        except EOFError:
            outcome = "the process died"
    process.join()
    return outcome


def _tell(job: Job, sending: Connection) -> None:
    try:
        outcome = _plant_and_look(job)
    except Exception:  # noqa: BLE001 - it is reported beside the outcomes of the others
        outcome = traceback.format_exc()[-2000:]
    sending.send(outcome)


def _plant_and_look(job: Job) -> str:
    _plant(job.planted)
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    signal.signal(signal.SIGVTALRM, _give_up)
    if job.story is not None:
        return _tell_story(job.story)
    from tests.sim.run import GRAMMARS, PREFIXED, any_world, run_world  # noqa: PLC0415 - the core must be loaded with it

    steps, seeds = (
        0,
        chain(job.first, chain.from_iterable((seed, PREFIXED + seed, GRAMMARS + seed) for seed in range(PREFIXED))),
    )
    while steps < job.most_steps:
        seed = next(seeds)
        signal.setitimer(signal.ITIMER_VIRTUAL, WORLD_SECONDS, 1)
        summary = run_world(any_world(seed), WORLD_STEPS, job.past)
        steps += summary.steps
        for report in summary.failures.values():
            return f"{seed} {steps} {report.split(' after ', 1)[0]}"
    return "survived"


def _tell_story(story: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        ended = pytest.main(["-q", "-p", "no:cacheprovider", story])
    if ended == pytest.ExitCode.OK:
        return "survived"
    return STORY_FAILED if ended == pytest.ExitCode.TESTS_FAILED else output.getvalue()[-2000:]


def _plant(planted: Planted) -> None:
    """For good: slips and removed calls load the core anew."""
    if isinstance(planted, Slip):
        plant_slip(planted)
    elif isinstance(planted, Mutant):
        plant_mutant(planted)
    else:
        fault = planted()
        fault.__enter__()
        _FAULTS.append(fault)  # one that nobody refers to would be undone


def _give_up(*_: object) -> None:
    raise EndlessStepError(f"a world took {WORLD_SECONDS} seconds")
