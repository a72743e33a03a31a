"""`python -m bench.gpu`: checks and measures everything that computes on a GPU, in less than eight minutes.

It checks every kernel against PyTorch, runs small models under the memory checker, compares turns token by token
(captured steps with steps queued one kernel at a time, and both with the reference; also with guesses, grammars and
penalties), and measures. Weights are random and made on the device. It writes `gpu.json` and a table, `gpu.md`, into a
folder. Parts that it comes to too late are not run; `--only` names these for another run.

Limits are measured in the same run: the bandwidth of a copy on the device, and the rate of a large matrix product.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu import checks, server, sessions, speed
from bench.gpu.models import TimedQueue, executor
from bench.random_models import EIGHT, TYPES, stored
from tenuto.exec.gpu.forward import GpuForward


@dataclass
class Report:
    """The results of a run, written to `folder` after each part, so that an interrupted run leaves some. No part begins
    after `end`, in seconds of `time.perf_counter`."""

    folder: Path
    found: dict[str, Any]
    end: float = math.inf

    @property
    def late(self) -> bool:
        """Whether no further part begins."""
        return time.perf_counter() >= self.end

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Runs a part of the report. An error becomes its result, and the other parts are still run."""
        begin = time.perf_counter()
        try:
            result = work() if not self.late else "not run: it came too late"
        except Exception as error:  # noqa: BLE001 - an error is a finding
            result = f"failed: {type(error).__name__}: {error}"[:2000]
        self.found[name] = result
        print(f"[{time.perf_counter() - begin:5.1f} s] {name}: {json.dumps(result)}", flush=True)
        (self.folder / "gpu.json").write_text(json.dumps(self.found, indent=1))
        return result


def table(found: dict[str, Any]) -> str:
    """Returns the measurements of a report as Markdown, as far as there are any."""
    limit = found["limits"]
    lines = [
        f"{found['gpu']}, PyTorch {found['torch']}. A copy on the device moves {limit['bytes'] / 1e12:.2f} TB/s; a",
        f"product of 8,192 x 8,192 matrices in bfloat16 makes {limit['flops'] / 1e12:.0f} TFLOP/s.",
        "",
        "| weights | sequences | ms a step | tokens/s | of the bandwidth | host, us a step | its launch |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += _of_steps(found)
    if isinstance(parked := found.get("parking"), dict):
        out, back, most = (f"{parked[way]:.0f} GB/s" for way in ("out_gb_s", "back_gb_s", "limit_gb_s"))
        lines += ["", f"Parked pages leave at {out} and come back at {back}; a pinned copy makes {most}."]
    if isinstance(asked := found.get("asking"), dict):
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in asked.items())
        lines += ["", f"A decode step of 64 sequences, by what all ask for beside a token: {times}."]
    if isinstance(turns := found.get("sessions"), dict):
        for name in ("captured", "kernel by kernel"):
            each, first = turns[name], f"first token after {turns[name]['first_token_ms']:.0f} ms"
            speed = f"{each['tokens_s']:,.0f} tokens/s, {each['of_limit']:.2f} of prompts and decodes alone"
            lines += ["", f"Sessions, {name}: {speed}, {first}."]
    for part in ("products", "experts", "recurrent"):
        if isinstance(each := found.get(part), dict):
            columns = list(next(iter(each.values())))
            lines += ["", f"| {part} | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
            lines += [f"| {name} | {' | '.join(f'{one[c]:.2f}' for c in columns)} |" for name, one in each.items()]
    return "\n".join([*lines, ""])


def _of_steps(found: dict[str, Any]) -> list[str]:
    """Returns the lines of decodes, which end the table, and of prompts."""
    lines = []
    for name, one in found.items():
        if name.startswith("decode ") and isinstance(one, dict):
            weights, batch = name.removeprefix("decode ").rsplit(" ", 1)
            speed, share = f"{one['ms']:.2f} | {one['tokens_s']:,.0f}", f"{one['of_bandwidth']:.2f}"
            host = f"{one['host_us']:.0f} ({one['host_low_us']:.0f}-{one['host_high_us']:.0f}) | {one['launch_us']:.0f}"
            lines.append(f"| {weights} | {batch} | {speed} | {share} | {host} |")
    for name, one in found.items():
        if name.startswith("prefill ") and isinstance(one, dict):
            speed, rate = f"{one['tokens_s']:,.0f} tokens/s", f"{one['of_rate']:.2f} of the rate"
            weights = name.removeprefix("prefill ")
            lines += ["", f"A prompt of {one['tokens']:,} tokens, {weights}: {one['ms']:.0f} ms, {speed}, {rate}."]
    return lines


SPEED = (
    "decode",
    "asking",
    "quantized",
    "prefill",
    "parking",
    "sessions",
    "products",
    "experts",
    "recurrent",
    "profile",
)
PARTS = ("turns", "guesses", "kernels", "prompts", "waiting", "sanitizer", "server", *SPEED)


def main() -> None:
    """Runs all parts, or those named."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder for the report")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS, help="the parts to run")
    parser.add_argument("--seconds", type=float, default=400, help="time after which no further part begins")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    properties = torch.cuda.get_device_properties(0)
    end = time.perf_counter() + options.seconds
    report = Report(options.out, {"gpu": properties.name, "torch": torch.__version__}, end)
    print(f"{properties.name}, PyTorch {torch.__version__}", flush=True)
    works: dict[str, Callable[[], Any]] = {
        "turns": checks.same_turns,
        "guesses": checks.same_guesses,
        "kernels": lambda: checks.kernels(options.out),
        "prompts": checks.prompts_in_bfloat16,
        "waiting": checks.steps_without_waiting,
        "sanitizer": lambda: checks.memory_checker(options.out),
        "server": server.conversations,
    }
    for part, work in works.items():
        if part in options.only:
            report.part(part, work)
    measured(report, set(options.only))


def measured(report: Report, parts: set[str]) -> None:
    """Runs the measurements, of which the larger ones are of a model of 8 billion parameters."""
    if not parts & set(SPEED) or report.late:
        return
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # a thread that moves between cores is slower
    limit = report.part("limits", speed.limits)
    if wanted := parts & {"decode", "asking", "prefill", "parking"}:
        _in_bfloat16(report, wanted, limit)
    if "quantized" in parts:
        for name in ("int4", "fp8"):
            _quantized(report, name, limit)
    works: dict[str, Callable[[], Any]] = {
        "sessions": sessions.compared,
        "products": lambda: speed.products(limit["bytes"], limit["flops"]),
        "experts": lambda: speed.experts(limit["bytes"], limit["flops"]),
        "recurrent": lambda: speed.recurrent(limit["bytes"]),
    }
    for part, work in works.items():
        if part in parts:
            report.part(part, work)
    if "profile" in parts:  # last: once the profiler has run, captured steps are launched more slowly
        for name, kind in {"bfloat16": None, "int4": TYPES["int4"]}.items():
            with executor(EIGHT, torch.bfloat16, GpuForward, stored(EIGHT, kind)) as made:
                report.part(f"kernels of decode {name} 1", partial(speed.longest_kernels, made, 1))
    (report.folder / "gpu.md").write_text(table(report.found))


def _in_bfloat16(report: Report, parts: set[str], limit: dict[str, float]) -> None:
    if report.late:
        return
    queue = TimedQueue()
    with executor(EIGHT, torch.bfloat16, GpuForward, queue=queue) as made:
        if "decode" in parts:
            for batch in speed.BATCHES:
                report.part(f"decode bfloat16 {batch}", partial(speed.decoding, made, batch, limit["bytes"], queue))
        if "asking" in parts:
            report.part("asking", partial(speed.asking, made, 64))
        if "prefill" in parts:
            report.part("prefill bfloat16", partial(speed.prefilling, made, limit["flops"]))
        if "parking" in parts:
            report.part("parking", partial(speed.parking, made))


def _quantized(report: Report, name: str, limit: dict[str, float]) -> None:
    queue, kind = TimedQueue(), TYPES[name]
    if report.late:
        return
    with executor(EIGHT, torch.bfloat16, GpuForward, stored(EIGHT, kind), queue) as made:
        for batch in (1, 16, 64):
            work = partial(speed.decoding, made, batch, limit["bytes"], queue, kind)
            report.part(f"decode {name} {batch}", work)
        report.part(f"prefill {name}", partial(speed.prefilling, made, limit["flops"]))


if __name__ == "__main__":
    main()
