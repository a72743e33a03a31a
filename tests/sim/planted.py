"""Runs worlds and stories with a planted change, in a separate process, until one of them fails."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from time import process_time, time

import pytest

from tests.deadlines import allow_any_time
from tests.sim.mutants import Mutant
from tests.sim.run import (
    ADAPTED,
    DRAFTED,
    ERASING,
    EXPECTING,
    GRAMMARS,
    HEADED,
    LIMITED,
    OVERTAKING,
    PREFIXED,
    REPLACING,
    TRAINED,
    any_world,
    run_world,
)
from tests.sim.slips import Slip
from tests.sim.slips_of_kernels import NativeSlip
from tests.sim.telling import module_of, tell

Planted = Callable[[], AbstractContextManager[None]] | Slip | NativeSlip | Mutant | None
"""A fault that replaces methods, a change of one method's source, or nothing."""

Catcher = int | str
"""The seed of a world, or the id of a test."""

WORLD_STEPS = 150
CPU_SECONDS = 15
"""Processor time allowed for a world or a story, many times what any needs, so that endless steps are found."""
SECONDS = 60
"""The wall-clock time allowed."""

MAX_MEMORY = 3 << 30
"""In bytes: an endless step may also use up memory."""

UNDER_PYTEST = {
    f"tests/exec/test_{name}.py" for name in ("kv_cache_dtype", "model_executor", "native_forward", "state_slots")
} | {"tests/session/test_fleet_journals.py"}

allow_any_time()  # before modules with stories are imported

FORKSERVER = multiprocessing.get_context("forkserver")
_FAULTS: list[object] = []


class EndlessStepError(Exception):
    """The engine does not return."""


@dataclass(frozen=True)
class Job:
    """The change to plant, and where to look for it: in the known story, or in worlds, starting with the known one, for
    `most_steps`. Rules in `past` may be broken. `name`: the change's name, for tests that need pytest."""

    planted: Planted
    most_steps: int
    known: Catcher | None = None
    past: Collection[str] = ()
    name: str = ""


@dataclass(frozen=True)
class Outcome:
    """`catcher` caught the change, by `how`; `None` if nothing did. `seconds`: the processor time of the search."""

    catcher: Catcher | None
    how: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.seconds:5.2f} s  {self.how if self.catcher is not None else self.how.upper():<40}"


def look_for_all(jobs: Iterable[Job]) -> Iterator[Outcome]:
    """Yields the outcome of each job, in order.

    Each runs in a separate process, forked from one that has loaded all modules: a new Python would take longer to
    start than most worlds run.
    """
    jobs = list(jobs)
    stories = {module_of(job.known) for job in jobs if isinstance(job.known, str) and not needs_pytest(job.known)}
    FORKSERVER.set_forkserver_preload([__name__, "tests.sim.everything", *sorted(stories)])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(_look, jobs)


def needs_pytest(catcher: Catcher | None) -> bool:
    """Returns whether the catcher is a test of executors, whose fixtures take seconds to make models and longer to
    compile, or one that starts PostgreSQL, which only pytest ends."""
    return isinstance(catcher, str) and catcher.partition("::")[0] in UNDER_PYTEST


def _place_of(error: Exception) -> str:
    """Returns the file and the line that raised an error."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return f"{raised.filename}:{raised.lineno}"


def _run_pytest(job: Job) -> Outcome:
    command = [sys.executable, "-m", "tests.sim.under_pytest", job.name, str(job.known)]
    began = time()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time() - began
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return Outcome(None, (done.stdout + done.stderr)[-2000:], seconds)
    caught = done.returncode == pytest.ExitCode.TESTS_FAILED
    return Outcome(job.known if caught else None, "a test failed" if caught else "survived its test", seconds)


def _look(job: Job) -> Outcome:
    """Runs one job in a separate process."""
    if needs_pytest(job.known):
        return _run_pytest(job)
    receiving, sending = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=_tell, args=(job, sending))
    process.start()
    sending.close()
    with receiving:
        try:
            outcome: Outcome = receiving.recv()
        except EOFError:
            outcome = Outcome(job.known, "the process died")
    process.join()
    return outcome


def _tell(job: Job, sending: Connection) -> None:
    try:
        outcome = _plant_and_look(job)
    except Exception:  # noqa: BLE001 - it is reported beside the outcomes of the others
        outcome = Outcome(None, traceback.format_exc()[-2000:])
    sending.send(outcome)


def _plant_and_look(job: Job) -> Outcome:
    gc.unfreeze()  # the functions to change are searched among all objects
    plant(job.planted)
    gc.freeze()  # so that collections neither look at the modules loaded before the fork nor copy their pages
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    signal.signal(signal.SIGPROF, _give_up)
    signal.signal(signal.SIGALRM, _give_up)
    began = process_time()
    if isinstance(job.known, str):
        _set_timers()
        try:
            tell(job.known)
        except Exception as error:  # noqa: BLE001 - however a test fails
            return Outcome(job.known, f"{type(error).__name__} at {_place_of(error)}", process_time() - began)
        return Outcome(None, "survived its story", process_time() - began)
    steps, first = 0, () if job.known is None else (job.known,)
    earlier = (0, PREFIXED, GRAMMARS, OVERTAKING, ADAPTED, LIMITED, DRAFTED, ERASING, REPLACING, EXPECTING)
    others = (first + seed for seed in range(PREFIXED) for first in (*earlier, TRAINED, HEADED))
    for seed in chain(first, others):
        _set_timers()
        summary = run_world(any_world(seed), WORLD_STEPS, job.past)
        steps += summary.steps
        for report in summary.failures.values():
            return Outcome(seed, f"{seed} {steps} {report.split(' after ', 1)[0]}", process_time() - began)
        if steps >= job.most_steps:
            break
    return Outcome(None, f"survived {steps} steps", process_time() - began)


def plant(planted: Planted) -> None:
    """Plants the change until the process ends."""
    if isinstance(planted, Slip | NativeSlip | Mutant):
        planted.plant()
    elif planted is not None:
        fault = planted()
        fault.__enter__()
        _FAULTS.append(fault)  # an unreferenced one would be undone


def _set_timers() -> None:
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS, 1)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 1)


def _give_up(*_: object) -> None:
    raise EndlessStepError(f"a world or a story took {CPU_SECONDS} s of processor time, or {SECONDS} s in all")
