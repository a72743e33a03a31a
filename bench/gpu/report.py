"""The report of a run: the verdicts of checks, and what was measured. It is written after every part, so that a run
which ends early leaves what it found."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenuto.exec.model_executor import ModelExecutor

GRACE = 12.0
"""Seconds after its end in which a run may still stop by itself."""


class Late(BaseException):
    """The time of a run is over. It is no `Exception`, so that no part takes it for an error of its own."""


class Verdict(StrEnum):
    """What a check found. `FAILED`: it ended with an error. `LEFT_OUT`: it was not done, or not to its end."""

    SAME = "same"
    DIFFERS = "differs"
    FAILED = "failed"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check, and what it looked at, why it failed, or why it was left out."""

    verdict: Verdict
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.detail}"


@dataclass
class Report:
    """The results of a run, in `folder`. `found`: what `gpu.json` has. No part goes on after `end`, in seconds of
    `time.perf_counter`."""

    folder: Path
    found: dict[str, Any]
    end: float
    checks: dict[str, Check] = field(default_factory=dict)
    missing: dict[str, Check] = field(default_factory=dict)
    """Measurements that failed or were left out."""
    _limited: bool = False

    @property
    def rest(self) -> float:
        """The seconds that are left."""
        return self.end - time.perf_counter()

    @property
    def status(self) -> int:
        """The exit status of the run: 1 if a check differs, or anything failed."""
        results = {each.verdict for each in (*self.checks.values(), *self.missing.values())}
        return int(bool(results & {Verdict.DIFFERS, Verdict.FAILED}))

    def check(self, name: str, work: Callable[[], Check | Mapping[str, Check]]) -> None:
        """Runs a check, or several at once. An error becomes the result."""
        begin = time.perf_counter()
        result = self._tried(work)
        each = {name: result} if isinstance(result, Check) else {f"{name}: {key}": one for key, one in result.items()}
        self.checks |= each
        for key, one in each.items():
            self._say(begin, key, one)

    def measure(self, name: str, work: Callable[[], Any]) -> Any:
        """Runs a measurement; returns its result, or None if there is none."""
        begin = time.perf_counter()
        result = self._tried(work)
        if isinstance(result, Check):
            self.missing[name] = result
        else:
            self.found[name] = result
        self._say(begin, name, result)
        return None if isinstance(result, Check) else result

    def measure_each(self, name: str, works: Callable[[], Iterable[tuple[str, dict[str, float]]]]) -> None:
        """Runs a measurement of several things, and keeps those that come before an error."""
        found: dict[str, dict[str, float]] = {}

        def work() -> dict[str, dict[str, float]]:
            for key, value in works():
                found[key] = value
                self.found[name] = found
            return found

        self.measure(name, work)

    def measure_on(
        self, make: Callable[[ExitStack], ModelExecutor], works: Mapping[str, Callable[[ModelExecutor], Any]]
    ) -> None:
        """Runs measurements on one executor, which `make` makes. After one that fails, the others get a new one."""
        made: list[ModelExecutor] = []
        stack = ExitStack()
        for i, (name, work) in enumerate(works.items(), start=1):

            def each(work: Callable[[ModelExecutor], Any] = work) -> Any:
                if not made:
                    made.append(make(stack))
                return work(made[0])

            if self.measure(name, each) is None or i == len(works):
                made.clear()
                try:
                    stack.close()
                except Exception as error:  # noqa: BLE001 - it fails for the same reason, which is reported
                    print(f"{name}: not closed: {error}", flush=True)

    def _tried(self, work: Callable[[], Any]) -> Any:
        if self.rest <= 0:
            return Check(Verdict.LEFT_OUT, "no time was left")
        if self._limited:
            signal.setitimer(signal.ITIMER_REAL, max(self.rest, 0.001))
        try:
            return work()
        except Late:
            return Check(Verdict.LEFT_OUT, "the time was over before its end")
        except Exception as error:  # noqa: BLE001 - an error is a finding
            return Check(Verdict.FAILED, f"{type(error).__name__}: {error}"[:500])
        finally:
            if self._limited:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _say(self, begin: float, name: str, result: Any) -> None:
        shown = str(result) if isinstance(result, Check) else json.dumps(result)
        print(f"[{time.perf_counter() - begin:5.1f} s] {name}: {shown}", flush=True)
        self.write()

    def write(self) -> None:
        """Writes `gpu.json` and `gpu.md`."""
        apart = {"checks": self.checks, "missing": self.missing}
        shown = {kind: {name: str(each) for name, each in results.items()} for kind, results in apart.items()}
        (self.folder / "gpu.json").write_text(json.dumps(self.found | shown, indent=1))
        (self.folder / "gpu.md").write_text(table(self))

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Within the block, the part that runs at the end of the time is interrupted with `Late`. If it does not heed
        that, the report is written without it and the process ends, `GRACE` seconds later."""

        def interrupt(*_: object) -> None:
            raise Late

        def stop() -> None:
            self.missing["all that was to come"] = Check(Verdict.FAILED, "a part did not stop when the time was over")
            self.write()
            print("stopped", file=sys.stderr, flush=True)
            os._exit(1)

        watch = threading.Timer(max(self.rest, 0) + GRACE, stop)
        watch.daemon = True
        watch.start()
        handler, self._limited = signal.signal(signal.SIGALRM, interrupt), True
        try:
            yield
        finally:
            self._limited = False
            signal.signal(signal.SIGALRM, handler)
            watch.cancel()


def table(report: Report) -> str:
    """Returns a report as Markdown, as far as it has come."""
    found = report.found
    lines = [f"{found['gpu']}, PyTorch {found['torch']}, Triton {found['triton']}."]
    if "limits" in found:
        moved, rate = found["limits"]["bytes"] / 1e12, found["limits"]["flops"] / 1e12
        lines += [f"A copy on the device moves {moved:.2f} TB/s; a product of large matrices makes {rate:.0f} TFLOP/s."]
    if report.checks:
        lines += ["", "| check | result | |", "| --- | --- | --- |"]
        lines += [f"| {name} | {each.verdict} | {_cell(each.detail)} |" for name, each in report.checks.items()]
    lines += _of_steps(found)
    if parked := found.get("parking"):
        out, back, most = (f"{parked[way]:.0f} GB/s" for way in ("out_gb_s", "back_gb_s", "limit_gb_s"))
        lines += ["", f"Parked pages leave at {out} and come back at {back}; a pinned copy makes {most}."]
    if turns := found.get("sessions"):
        for name in ("captured", "kernel by kernel"):
            each, first = turns[name], f"first token after {turns[name]['first_token_ms']:.0f} ms"
            speed = f"{each['tokens_s']:,.0f} tokens/s, {each['of_limit']:.2f} of prompts and decodes alone"
            lines += ["", f"Sessions, {name}: {speed}, {first}."]
    for part in ("asking", "products", "experts", "recurrent"):
        if each := found.get(part):
            columns = list(next(iter(each.values())))
            lines += ["", f"| {part} | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
            lines += [f"| {name} | {' | '.join(f'{one[c]:.2f}' for c in columns)} |" for name, one in each.items()]
    if report.missing:
        lines += ["", "| not measured | |", "| --- | --- |"]
        lines += [f"| {name} | {_cell(str(each))} |" for name, each in report.missing.items()]
    return "\n".join([*lines, ""])


def _of_steps(found: Mapping[str, Any]) -> list[str]:
    """Returns the lines of decodes and of prompts."""
    lines = []
    for name, one in found.items():
        if name.startswith("decode "):
            weights, batch = name.removeprefix("decode ").rsplit(" ", 1)
            speed, share = f"{one['ms']:.2f} | {one['tokens_s']:,.0f}", f"{one['of_bandwidth']:.2f}"
            host = f"{one['host_us']:.0f} ({one['host_low_us']:.0f}-{one['host_high_us']:.0f}) | {one['launch_us']:.0f}"
            lines.append(f"| {weights} | {batch} | {speed} | {share} | {host} |")
    if lines:
        head = "| weights | sequences | ms a step | tokens/s | of the bandwidth | host, us a step | its launch |"
        lines = ["", head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: |", *lines]
    for name, one in found.items():
        if name.startswith("prefill "):
            speed, rate = f"{one['tokens_s']:,.0f} tokens/s", f"{one['of_rate']:.2f} of the rate"
            weights = name.removeprefix("prefill ")
            lines += ["", f"A prompt of {one['tokens']:,} tokens, {weights}: {one['ms']:.0f} ms, {speed}, {rate}."]
    return lines


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
