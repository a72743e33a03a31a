"""`python -m bench.gpu`: checks and measures everything that computes on a GPU, in less than eight minutes.

It checks every kernel against PyTorch, runs small models under the memory checker, compares turns token by token
(captured steps with steps queued one kernel at a time, and both with the reference; also with guesses, grammars and
penalties), and measures. Weights are random and made on the device. After every part it writes `gpu.json` and a table,
`gpu.md`, into a folder. A part that fails is named there, and the others go on. What does not end within `--seconds`
is left out; `--only` names parts for another run. The exit status is 1 if a check differs, or anything failed.

Limits are measured in the same run: the bandwidth of a copy on the device, and the rate of a large matrix product.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from bench.gpu import checks, server, sessions, speed
from bench.gpu.models import HALF, TimedQueue, executor, queue
from bench.gpu.report import Check, Report
from bench.random_models import EIGHT, TYPES, stored
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.model_executor import ModelExecutor

SECONDS = 440.0
"""Time for all parts. With the imports and `bench.gpu.report.GRACE`, a run takes less than eight minutes."""
ROWS = 64
"""Rows of the steps that ask for more than a token."""
QUANTIZED = ("int4", "fp8")
STEPS = ("decode", "prefill", "parking", "asking")
"""Measurements that share a model of 8 billion parameters."""


class Parts:
    """The parts of a report."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._limits: dict[str, float] | None = None
        self.all: dict[tuple[str, ...], Callable[[set[str]], None]] = {
            ("turns",): lambda _: self._checks("turns", checks.turns),
            ("waiting",): lambda _: report.check("waiting", checks.steps_without_waiting),
            STEPS: self._plain_steps,
            ("kernels",): lambda _: report.check("kernels", lambda: checks.kernels(report.folder, report.rest)),
            ("prompts",): lambda _: self._checks("16 bits", checks.in_16_bits),
            ("guesses",): lambda _: self._checks("guesses", checks.guesses),
            ("sanitizer",): lambda _: report.check(
                "sanitizer", lambda: checks.memory_checker(report.folder, report.rest)
            ),
            ("server",): lambda _: report.check("server", lambda: server.conversations(report.rest)),
            ("sessions",): lambda _: self._sessions(),
            ("quantized",): lambda _: self._quantized_steps(),
            ("experts",): lambda _: self._measured("experts", speed.experts, "bytes", "flops"),
            ("recurrent",): lambda _: self._measured("recurrent", speed.recurrent, "bytes"),
            ("products",): lambda _: self._measured("products", speed.products, "bytes", "flops"),
            # Last: once the profiler has run, captured steps are launched more slowly.
            ("profile",): lambda _: self._profile(),
        }
        """What runs parts, by their names; it is given those that are wanted. Checks and the figures that matter most
        are first."""

    def _checks(self, part: str, works: Callable[[], Mapping[str, Callable[[], Check]]]) -> None:
        try:
            named = works()
        except Exception as error:  # noqa: BLE001 - an error is a finding
            named = {"all": partial(_raised, error)}
        for name, work in named.items():
            self._report.check(f"{part}: {name}", work)

    def _limit(self) -> dict[str, float]:
        """Returns the device's limits, not a number if they cannot be measured."""
        if self._limits is None:
            found = self._report.measure("limits", speed.limits)
            self._limits = found if found is not None else dict.fromkeys(("bytes", "flops"), math.nan)
        return self._limits

    def _plain_steps(self, wanted: set[str]) -> None:
        timed, works = TimedQueue(queue()), dict[str, Callable[[ModelExecutor], Any]]()
        with one_core():
            limit = self._limit()
            if "decode" in wanted:
                for rows in speed.BATCHES:
                    works[f"decode bfloat16 {rows}"] = partial(_decoding, rows, limit["bytes"], timed, None)
            if "prefill" in wanted:
                works["prefill bfloat16"] = partial(speed.prefilling, rate=limit["flops"])
            if "parking" in wanted:
                works["parking"] = speed.parking
            if "asking" in wanted:
                works["asking"] = lambda made: dict(speed.asking(made, ROWS))
            self._report.measure_on(partial(_made, None, timed), works)

    def _quantized_steps(self) -> None:
        for name in QUANTIZED:
            timed, works = TimedQueue(queue()), dict[str, Callable[[ModelExecutor], Any]]()
            with one_core():
                limit = self._limit()
                for rows in (1, 16, 64):
                    works[f"decode {name} {rows}"] = partial(_decoding, rows, limit["bytes"], timed, name)
                works[f"prefill {name}"] = partial(speed.prefilling, rate=limit["flops"])
                self._report.measure_on(partial(_made, name, timed), works)

    def _sessions(self) -> None:
        with one_core():
            self._report.measure("sessions", sessions.compared)

    def _measured(
        self, part: str, measure: Callable[..., Iterator[tuple[str, dict[str, float]]]], *limits: str
    ) -> None:
        with one_core():
            limit = self._limit()
            self._report.measure_each(part, lambda: measure(*(limit[name] for name in limits)))

    def _profile(self) -> None:
        with one_core():
            for name in (None, "int4"):
                part = f"kernels of a decode in {name or 'bfloat16'}"
                self._report.measure_on(partial(_made, name, queue()), {part: lambda on: speed.longest_kernels(on, 1)})


def _raised(error: Exception) -> Check:
    raise error


def _made(weights: str | None, own: Any, stack: ExitStack) -> ModelExecutor:
    """Makes an executor, to be closed by `stack`, of the large model with `weights` of these types."""
    kind = None if weights is None else TYPES[weights]
    given = None if kind is None else stored(EIGHT, kind)
    return stack.enter_context(executor(EIGHT, HALF, GpuForward, given, own))


def _decoding(rows: int, limit: float, timed: TimedQueue, weights: str | None, made: ModelExecutor) -> Any:
    return speed.decoding(made, rows, limit, timed, None if weights is None else TYPES[weights])


@contextmanager
def one_core() -> Iterator[None]:
    """Keeps this thread, and those that it starts, on one core during the block: it is slower if it moves."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all parts, or those named; returns the exit status."""
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder for the report")
    parser.add_argument("--only", nargs="*", help="the parts to run")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for all parts together")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    gpu = torch.cuda.get_device_properties(0).name
    report = Report(options.out, {"gpu": gpu, **versions}, begin + options.seconds)
    report.write()
    parts = Parts(report).all
    names = {name for group in parts for name in group}
    wanted = names if options.only is None else set(options.only)
    if unknown := wanted - names:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    with report.limited():
        for group, run in parts.items():
            if these := wanted & set(group):
                run(these)
    report.write()
    return report.status


if __name__ == "__main__":
    sys.exit(main())
