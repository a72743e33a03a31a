"""`python -m bench.gpu`: checks and measures everything that computes on a GPU, in less than eight minutes.

It checks every kernel against PyTorch, runs small kernels under the memory checker, compares turns token by token
(captured steps with steps queued one kernel at a time, and both with the reference), and measures. Weights are random
and made on the device. It writes `gpu.json` and a table, `gpu.md`, into a folder.

Limits are measured in the same run: the bandwidth of a copy on the device, and the rate of a large matrix product.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.spread import repeated
from tenuto.base.plan import PREVIOUS_SAMPLE, Ints, PageCopies, Plan, RowSampling, StateMoves, TableChanges
from tenuto.base.sampling import GREEDY, Sampling
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.gpu.queue import CudaQueue
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.gpu.fused import FUSED
from tenuto.models.config import Attention, GatedDelta, Layer, Mixer, Mlp, ModelConfig
from tenuto.models.decoder import Decoder
from tenuto.models.rope import Rope

PAGE = 32
BATCHES = (1, 4, 16, 64, 128, 256)
CONTEXT = 2048
DECODES = 48
"""Steps of one measurement of decoding."""

PROMPT = 8192
PARKED = 2**30
"""Bytes that a measurement of parked state moves."""

CUDA = torch.device("cuda")
NOTHING = np.zeros(0, np.int32)


def model(layers: int, hidden: int, mixers: Sequence[Mixer], width: int, vocab: int, context: int) -> ModelConfig:
    """Returns the shape of a model whose layers have `mixers` in turn."""
    each = tuple(Layer(mixers[i % len(mixers)], Mlp(width)) for i in range(layers))
    return ModelConfig(each, hidden, vocab, 1e-5, tied=False, max_context=context, eos=(0,), bos=None, dtype="bfloat16")


def attention(heads: int, kv_heads: int, head_dim: int, **more: Any) -> Attention:
    """Returns the shape of a layer that rotates all of a head; `more`: fields of `Attention`."""
    return Attention(heads, kv_heads, head_dim, Rope(500_000.0, (1.0,) * (head_dim // 2)), head_dim**-0.5, **more)


EIGHT = model(32, 4096, [attention(32, 8, 128)], 14_336, 128_256, 131_072)
"""The shape of a model of 8 billion parameters (that of Llama 3.1)."""

SMALL = {
    "full attention": model(4, 256, [attention(4, 2, 64)], 512, 1000, 4096),
    "windows, sinks, norms": model(4, 256, [attention(4, 1, 64, window=40, sinks=True, qk_norm=True)], 512, 1000, 4096),
    "gated delta net": model(4, 256, [GatedDelta(2, 4, 32, 32, 4), attention(4, 2, 64, gated=True)], 512, 1000, 4096),
}
"""Small models whose turns are compared."""


class Eager(GpuForward):
    """Queues the kernels of every step one by one."""

    def decode(self, *_: object) -> None:
        return None


class Rows:
    """Rows of one executor, each with its own pages and state slot, at the same position."""

    def __init__(self, executor: ModelExecutor, rows: int, context: int, sampling: Sampling = GREEDY) -> None:
        """Prepares the executor for rows of `context` tokens."""
        self.executor, self.rows, self.at = executor, rows, 0
        self._pages = -(-context // PAGE)
        paged = [group.paged for group in executor.spec.groups]
        executor.prepare(tuple(rows * self._pages if page else rows for page in paged), rows, overlap=1)
        self._paged, self._states = sum(paged), len(paged) - sum(paged)
        self._sampling: tuple[tuple[int, RowSampling], ...] = tuple((i, RowSampling(sampling)) for i in range(rows))
        self._steps = 0

    def plan(self, tokens: Ints) -> Plan:
        """Returns the next step; `tokens` is int32 [rows, tokens of each]. Every row samples once."""
        rows, count = tokens.shape
        ids = np.arange(rows, dtype=np.int32)
        first, last = -(-self.at // PAGE), -(-(self.at + count) // PAGE)
        index = np.tile(np.arange(first, last, dtype=np.int32), rows)
        owners = np.repeat(ids, last - first)
        changes = TableChanges(owners, index, owners * self._pages + index)
        none = np.zeros(rows, np.int32)
        moves = StateMoves(ids if self.at else ids * 0 - 1, ids, none, none)
        sampling, self._sampling = self._sampling, ()
        plan = Plan(
            step=self._steps,
            rows=ids,
            starts=np.full(rows, self.at, np.int32),
            counts=np.full(rows, count, np.int32),
            tokens=tokens.reshape(-1),
            samples=np.ones(rows, np.int32),
            tables=(changes,) * self._paged,
            copies=(PageCopies(NOTHING, NOTHING, NOTHING),) * self._paged,
            states=(moves,) * self._states,
            sampling=sampling,
        )
        self._steps += 1
        self.at += count
        return plan

    def run(self, tokens: Ints) -> Ints:
        """Computes `tokens` and returns the sampled ones."""
        self.executor.submit(self.plan(tokens))
        return self.executor.collect().tokens

    def fill(self, context: int) -> None:
        """Gives all rows random keys and values for `context` tokens."""
        pages = np.arange(self.rows * self._pages, dtype=np.int32)
        table = TableChanges(pages // self._pages, pages % self._pages, pages)
        none = PageCopies(NOTHING, NOTHING, NOTHING)
        plan = Plan(0, *(NOTHING,) * 5, tables=(table,), copies=(none,), states=(), sampling=())
        forward = self.executor.forward
        assert isinstance(forward, TorchForward)
        forward.apply(plan)
        for group in forward.memories.pages.values():
            group.units[0].normal_(std=0.5)
        self.at = context

    def turns(self, prompts: Ints, steps: int, overlap: int = 1) -> Ints:
        """Computes prompts, int32 [rows, tokens], then `steps` decodes; returns the sampled tokens, [1 + steps,
        rows]."""
        first = self.run(prompts)
        return np.stack([first, *self.decode(first, steps, overlap)])

    def decode(self, tokens: Ints, steps: int, overlap: int = 1) -> list[Ints]:
        """Computes `steps` decodes from `tokens`, int32 [rows], on, and returns what each samples, int32 [rows]. With
        `overlap`, a step is submitted before the one before it has been collected."""
        found = []
        for step in range(steps):
            known = tokens if step == 0 or not overlap else np.full_like(tokens, PREVIOUS_SAMPLE)
            self.executor.submit(self.plan(known[:, None]))
            if step >= overlap:
                tokens = self.executor.collect().tokens
                found.append(tokens)
        return found + [self.executor.collect().tokens for _ in range(min(overlap, steps))]


@contextmanager
def executor(
    config: ModelConfig, dtype: torch.dtype, kind: Callable[..., TorchForward], seed: int = 0
) -> Iterator[ModelExecutor]:
    """Yields an executor with random weights, the same for the same seed."""
    torch.manual_seed(seed)
    with torch.inference_mode():
        decoder = Decoder(config, None, CUDA, dtype, None if kind is TorchForward else FUSED)
    forward = kind(decoder, PAGE) if kind is TorchForward else kind(decoder, PAGE, CudaQueue(CUDA))
    made = ModelExecutor(forward)
    try:
        yield made
    finally:
        made.close()


# -- checks


def same_turns() -> dict[str, str]:
    """Compares turns of small models in float32, greedy and sampled."""
    found = {}
    drawn = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3)
    for name, config in SMALL.items():
        for sampling in (GREEDY, drawn):
            prompts = np.random.default_rng(1).integers(0, config.vocab, (5, 150)).astype(np.int32)
            results = {}
            for kind in (TorchForward, Eager, GpuForward):
                with executor(config, torch.float32, kind) as made:
                    results[kind.__name__] = Rows(made, 5, 512, sampling).turns(prompts, 200)
            captured = results["GpuForward"]
            for other in ("Eager", "TorchForward"):
                differing = (results[other] != captured).any(axis=1)
                at = int(differing.argmax()) if differing.any() else None
                what = f"{name}, {'greedy' if sampling is GREEDY else 'sampled'}: captured steps and {other}"
                found[what] = "same tokens" if at is None else f"differ from step {at} of {len(captured)}"
    return found


def kernels(folder: Path) -> str:
    """Runs the kernels' tests on the device; returns pytest's last line."""
    log = folder / "kernels.txt"
    options = ["-q", "-n", "8", "--maxfail", "5", "--no-header", "--noconftest", "-c", os.devnull, "--rootdir", "."]
    paths = ["tests/kernels/gpu", "tests/exec/gpu", "--ignore", "tests/kernels/gpu/test_compiled.py"]  # needs no GPU
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", *paths]
    with log.open("w") as file:
        subprocess.run(  # noqa: S603 - our own command
            command, stdout=file, stderr=subprocess.STDOUT, timeout=240, check=False
        )
    return log.read_text().strip().splitlines()[-1]


def memory_checker(folder: Path) -> str:
    """Runs a few steps of a small model under `compute-sanitizer`; returns its last line."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return "not run: there is no compute-sanitizer"
    log = folder / "sanitizer.txt"
    child = [sys.executable, "-c", "import bench.gpu as g; g.few_steps()"]
    with log.open("w") as file:
        subprocess.run(  # noqa: S603 - our own command
            [tool, "--tool", "memcheck", *child],
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=180,
            check=False,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
    return log.read_text().strip().splitlines()[-1]


def few_steps() -> None:
    """Computes a prompt and a few decodes of each small model."""
    for config in SMALL.values():
        with executor(config, torch.float16, Eager) as made:
            rows = Rows(made, 3, 256)
            rows.turns(np.ones((3, 70), np.int32), 3, overlap=0)
    torch.cuda.synchronize()


# -- measurements


def timed(work: Callable[[], object], times: int = 5) -> float:
    """Returns the least seconds that `work` takes on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    least = float("inf")
    work()
    for _ in range(times):
        begin.record()
        work()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end) / 1e3)
    return least


def limits() -> dict[str, float]:
    """Measures the bandwidth of a copy, in bytes read and written a second, and the rate of a product of 8192 x 8192
    bfloat16 matrices, in floating-point operations a second."""
    a = torch.empty(2**31, dtype=torch.uint8, device=CUDA)
    b = torch.empty_like(a)
    x, y = (torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    return {"bytes": 2 * len(a) / timed(lambda: b.copy_(a)), "flops": 2 * 8192**3 / timed(lambda: x @ y)}


def weight_bytes(config: ModelConfig) -> int:
    """Returns the bytes of weights that a decode step reads, in 16 bits: all but the embedding."""
    return 2 * parameters(config)


def parameters(config: ModelConfig) -> int:
    """Returns the number of weights that every token is multiplied by; all layers have attention."""
    found = config.vocab * config.hidden
    for layer in config.layers:
        assert isinstance(layer.mixer, Attention)
        assert isinstance(layer.feed_forward, Mlp)
        a = layer.mixer
        found += (
            config.hidden * (2 * a.heads + 2 * a.kv_heads) * a.head_dim + 3 * config.hidden * layer.feed_forward.width
        )
    return found


def kv_bytes(config: ModelConfig, tokens: int) -> int:
    """Returns the bytes of keys and values of `tokens` tokens, in 16 bits."""
    mixers = [mixer for mixer in config.mixers if isinstance(mixer, Attention)]
    return sum(4 * mixer.kv_heads * mixer.head_dim for mixer in mixers) * tokens


def decoding(made: ModelExecutor, batch: int, bandwidth: float) -> dict[str, float]:
    """Measures decode steps of `batch` rows at `CONTEXT` tokens, each submitted before the one before it is
    collected. `host_us`: the time that the host takes to queue a step."""
    rows = Rows(made, batch, CONTEXT + 4 * DECODES)
    rows.fill(CONTEXT)
    first = np.ones(batch, np.int32)
    rows.decode(first, DECODES)
    context = rows.at + DECODES / 2  # on average
    begin = time.perf_counter()
    rows.decode(first, DECODES)
    seconds = (time.perf_counter() - begin) / DECODES
    torch.cuda.synchronize()
    host = []
    for _ in range(DECODES):
        plan = rows.plan(first[:, None])
        begin = time.perf_counter()
        wait = made.queue(plan)
        host.append(time.perf_counter() - begin)
        wait()
    moved = weight_bytes(EIGHT) + kv_bytes(EIGHT, 1) * batch * context
    made.forward.release_units()
    return {
        "ms": 1e3 * seconds,
        "tokens_s": batch / seconds,
        "of_bandwidth": moved / seconds / bandwidth,
        "host_us": 1e6 * float(np.median(host)),
    }


def longest_kernels(made: ModelExecutor, batch: int) -> dict[str, float]:
    """Returns the milliseconds of a decode step in the kernels that take longest, by name."""
    rows = Rows(made, batch, CONTEXT + DECODES)
    rows.fill(CONTEXT)
    first = np.ones(batch, np.int32)
    rows.decode(first, 2)
    found = profiled(lambda: rows.decode(first, 4))
    made.forward.release_units()
    return {name: each / 4 for name, each in found.items()}


def profiled(work: Callable[[], object]) -> dict[str, float]:
    """Returns the milliseconds that the device spends in each kernel of `work`, the 14 longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return {f"{event.key[:60]} x{event.count}": round(event.self_device_time_total / 1e3, 4) for event in events[:14]}


def steps_without_waiting(made: ModelExecutor) -> str:
    """Computes decode steps while PyTorch raises an error for every call that waits for the device."""
    rows = Rows(made, 4, 256)
    tokens = rows.turns(np.ones((4, 40), np.int32), 4)[-1]
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows.decode(tokens, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no call waited for the device"


def prefilling(made: ModelExecutor, rate: float) -> dict[str, Any]:
    """Measures a prompt of `PROMPT` tokens computed in one step."""
    attended = sum(mixer.heads * mixer.head_dim for mixer in EIGHT.mixers if isinstance(mixer, Attention))
    head = EIGHT.vocab * EIGHT.hidden
    work = 2 * (parameters(EIGHT) - head) * PROMPT + 2 * PROMPT * PROMPT * attended
    tokens = np.random.default_rng(0).integers(0, EIGHT.vocab, (1, PROMPT)).astype(np.int32)
    rows = Rows(made, 1, PROMPT)

    def once() -> float:
        rows.at = 0
        begin = time.perf_counter()
        rows.run(tokens)
        return time.perf_counter() - begin

    seconds = repeated(once, 5).median
    longest = profiled(once)
    made.forward.release_units()
    return {
        "longest": longest,
        "tokens": PROMPT,
        "ms": 1e3 * seconds,
        "tokens_s": PROMPT / seconds,
        "of_rate": work / seconds / rate,
    }


def parking(made: ModelExecutor) -> dict[str, float]:
    """Measures the bandwidth with which pages move to the host and back, beside the limit of pinned copies."""
    count = PARKED // made.unit_bytes(0)
    made.prepare((count,), 1)
    units = np.arange(count, dtype=np.int32)
    moved = count * made.unit_bytes(0)
    data = made.read_units(0, units)
    out = repeated(lambda: _seconds(lambda: made.read_units(0, units)), 3).median
    back = repeated(lambda: _seconds(lambda: made.write_units(0, units, list(data))), 3).median
    host, device = (
        torch.empty(moved, dtype=torch.uint8, pin_memory=True),
        torch.empty(moved, dtype=torch.uint8, device=CUDA),
    )
    limit = timed(lambda: host.copy_(device, non_blocking=True))
    return {
        "bytes": moved,
        "out_gb_s": moved / out / 1e9,
        "back_gb_s": moved / back / 1e9,
        "limit_gb_s": moved / limit / 1e9,
    }


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


# -- the run


@dataclass
class Report:
    """The results of a run, written to `folder` after each part, so that an interrupted run leaves some."""

    folder: Path
    found: dict[str, Any]

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Runs a part of the report. An error becomes its result, and the other parts are still run."""
        begin = time.perf_counter()
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - an error is a finding
            result = f"failed: {type(error).__name__}: {error}"[:2000]
        self.found[name] = result
        print(f"[{time.perf_counter() - begin:5.1f} s] {name}: {json.dumps(result)}", flush=True)
        (self.folder / "gpu.json").write_text(json.dumps(self.found, indent=1))
        return result


def table(found: dict[str, Any]) -> str:
    """Returns the measurements of a report as Markdown."""
    limit, prefill, parked = found["limits"], found["prefill"], found["parking"]
    lines = [
        f"{found['gpu']}, PyTorch {found['torch']}. A copy on the device moves {limit['bytes'] / 1e12:.2f} TB/s; a",
        f"product of 8,192 x 8,192 matrices in bfloat16 makes {limit['flops'] / 1e12:.0f} TFLOP/s.",
        "",
        "| sequences | ms a step | tokens/s | of the bandwidth | host, us a step |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for batch in BATCHES:
        one = found[f"decode {batch}"]
        speed, share = f"{one['ms']:.2f} | {one['tokens_s']:,.0f}", f"{one['of_bandwidth']:.2f}"
        lines.append(f"| {batch} | {speed} | {share} | {one['host_us']:.0f} |")
    tokens, rate = f"{prefill['tokens_s']:,.0f} tokens/s", f"{prefill['of_rate']:.2f} of the rate"
    out, back, most = (f"{parked[way]:.0f} GB/s" for way in ("out_gb_s", "back_gb_s", "limit_gb_s"))
    lines += [
        "",
        f"A prompt of {prefill['tokens']:,} tokens takes {prefill['ms']:.0f} ms: {tokens}, {rate}. Parked pages",
        f"leave at {out} and come back at {back}; a pinned copy makes {most}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs all parts, or those named."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder for the report")
    parser.add_argument("--only", nargs="*", default=[], help="parts: kernels, turns, waiting, sanitizer, speed")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    properties = torch.cuda.get_device_properties(0)
    report = Report(options.out, {"gpu": properties.name, "torch": torch.__version__})

    def wanted(part: str) -> bool:
        return not options.only or part in options.only

    print(f"{properties.name}, PyTorch {torch.__version__}", flush=True)
    if wanted("turns"):
        report.part("turns", same_turns)
    if wanted("kernels"):
        report.part("kernels", lambda: kernels(options.out))
    if wanted("waiting"):
        with executor(SMALL["full attention"], torch.bfloat16, GpuForward) as made:
            report.part("waiting", lambda: steps_without_waiting(made))
    if wanted("sanitizer"):
        report.part("sanitizer", lambda: memory_checker(options.out))
    if wanted("speed"):
        speed(report)


def speed(report: Report) -> None:
    """Measures a model of 8 billion parameters."""
    limit = report.part("limits", limits)
    with executor(EIGHT, torch.bfloat16, GpuForward) as made:
        for batch in BATCHES:
            report.part(f"decode {batch}", partial(decoding, made, batch, limit["bytes"]))
        for batch in (1, 64):
            report.part(f"kernels of decode {batch}", partial(longest_kernels, made, batch))
        report.part("prefill", lambda: prefilling(made, limit["flops"]))
        report.part("parking", lambda: parking(made))
    if not any(str(each).startswith("failed") for each in report.found.values()):
        (report.folder / "gpu.md").write_text(table(report.found))


if __name__ == "__main__":
    main()
