"""Measurements on a GPU, beside the bandwidth and the rate that it reaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from torch.nn import functional

from bench.gpu.models import CUDA, HALF, NOTHING, Rows, TimedQueue, queue
from bench.random_models import EIGHT, TYPES, random_adapter, random_matrix
from bench.spread import repeated
from tenuto.base.plan import RowSampling
from tenuto.base.sampling import GREEDY, Sampling
from tenuto.exec.model_executor import ModelExecutor
from tenuto.kernels.gpu import quantized
from tenuto.kernels.gpu.experts import mix_experts
from tenuto.kernels.gpu.recurrent import convolve_step, gated_delta_step, mamba2_step, mamba_step
from tenuto.kernels.native.grouped import Grouped
from tenuto.kernels.quantized import Quantized
from tenuto.kernels.recurrent import Slots
from tenuto.models.config import Attention, Mlp, ModelConfig
from tenuto.models.quantized_places import QuantizedPlace, type_of

BATCHES = (1, 4, 16, 64, 128, 256)
CONTEXT = 2048
HOST = 150
"""Steps of one measurement of the host's time."""
DECODES = 48
"""Steps of one measurement of decoding."""

PROMPT = 8192
PARKED = 2**30
"""Bytes that a measurement of parked state moves."""
COPIED, SIDE = 2**31, 8192
"""Bytes of the copy, and the size of the matrices, that the limits are measured with."""
MATRICES, PRODUCT_ROWS = ((6144, 4096), (28_672, 4096), (4096, 14_336)), (1, 16, 64, 4096)
"""Quantized matrices (outputs, inputs), and the numbers of rows that are multiplied by them."""
UNCACHED = 2**27
"""Bytes of the matrices that are multiplied in turn, more than the device's cache holds."""
EXPERTS, EXPERTS_ROWS = (128, 8, 2048, 768), (1, 16, 64, 256, 2048)
"""Experts (their number, those chosen, their input and their width), and numbers of tokens."""
RECURRENT_ROWS = (16, 64, 256)


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


def captured(work: Callable[[Any], object], values: Sequence[Any]) -> float:
    """Returns the seconds on the device of one `work(value)`, without the time of the host."""

    def each() -> None:
        for value in values:
            work(value)

    return timed(queue().capture(each)) / len(values)


def limits() -> dict[str, float]:
    """Measures the bandwidth of a copy, in bytes read and written a second, and the rate of a product of square
    matrices in 16 bits, in floating-point operations a second."""
    a = torch.empty(COPIED, dtype=torch.uint8, device=CUDA)
    b = torch.empty_like(a)
    x, y = (torch.randn(SIDE, SIDE, device=CUDA, dtype=HALF) for _ in range(2))
    return {"bytes": 2 * len(a) / timed(lambda: b.copy_(a)), "flops": 2 * SIDE**3 / timed(lambda: x @ y)}


def weight_bytes(config: ModelConfig, numbers: Grouped | Kind | None = None) -> int:
    """Returns the bytes of weights that a decode step reads: all but the embedding, in 16 bits, but for matrices of
    layers whose type is `numbers`."""
    head = config.vocab * config.hidden
    layers = parameters(config) - head
    return 2 * head + (2 * layers if numbers is None else int(layers * bytes_each(numbers)))


def bytes_each(numbers: Grouped | Kind) -> float:
    """Returns the bytes of a weight on the device, with its part of the scale and of the minimum."""
    if not isinstance(numbers, Grouped):
        block, size = GGML_QUANT_SIZES[numbers]
        return size / block
    scale = 2 if numbers.halves else 4 * len(numbers.numbers.scales)
    return numbers.numbers.quant_bytes / 32 + scale / numbers.group


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


def decoding(
    made: ModelExecutor, batch: int, bandwidth: float, launches: TimedQueue, numbers: Grouped | Kind | None = None
) -> dict[str, float]:
    """Measures decode steps of `batch` rows at `CONTEXT` tokens, each submitted before the one before it is
    collected. `host_us`: the time that the host takes to queue a step; `launch_us`: the part of it in which the driver
    launches the captured step. `numbers`: the type of the layers' matrices."""
    rows = Rows(made, batch, CONTEXT + 2 * DECODES + HOST)
    seconds, context = _decoded(rows)
    launches.seconds.clear()
    host = _queued(rows)
    moved = weight_bytes(EIGHT, numbers) + kv_bytes(EIGHT, 1) * batch * context
    made.forward.release_units()
    return {
        "ms": 1e3 * seconds,
        "tokens_s": batch / seconds,
        "of_bandwidth": moved / seconds / bandwidth,
        "host_us": 1e6 * float(np.median(host)),
        "host_low_us": 1e6 * float(np.quantile(host, 0.1)),
        "host_high_us": 1e6 * float(np.quantile(host, 0.9)),
        "launch_us": 1e6 * float(np.median(launches.seconds)),
    }


def _decoded(rows: Rows) -> tuple[float, float]:
    """Returns the seconds of a decode step, and the tokens of context on average."""
    rows.fill(CONTEXT)
    first = np.ones(rows.rows, np.int32)
    rows.decode(first, DECODES)
    context = rows.at + DECODES / 2
    begin = time.perf_counter()
    rows.decode(first, DECODES)
    return (time.perf_counter() - begin) / DECODES, context


def _queued(rows: Rows) -> list[float]:
    """Returns the seconds that the host takes to queue each of `HOST` decode steps. As in a server, a step is queued
    while the one before it is computed."""
    made, waits, found = rows.executor, list[Callable[[], object]](), list[float]()
    torch.cuda.synchronize()
    plans = [rows.plan(np.ones((rows.rows, 1), np.int32)) for _ in range(HOST)]
    for plan in plans:
        begin = time.perf_counter()
        waits.append(made.queue(plan))
        found.append(time.perf_counter() - begin)
        if len(waits) > 1:
            waits.pop(0)()
    waits.pop()()
    return found


def asking(made: ModelExecutor, batch: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Measures decode steps of `batch` rows at `CONTEXT` tokens, by what all rows ask for besides a token: milliseconds
    of a step, and microseconds that the host takes to queue it."""
    penalised = Sampling(repetition_penalty=1.1, presence_penalty=0.5, logit_bias=((5, 1.0),))
    asked = {
        "nothing": RowSampling(GREEDY),
        "log-probabilities": RowSampling(GREEDY, top=0),
        "20 likeliest tokens": RowSampling(GREEDY, top=20),
        "penalties and biases": RowSampling(penalised, NOTHING, NOTHING),
        "masks": RowSampling(GREEDY),
        "adapters of rank 16": RowSampling(GREEDY),
    }
    for name, each in asked.items():
        adapters = [random_adapter(EIGHT, 16, seed) for seed in range(4)] if "adapters" in name else []
        rows = Rows(made, batch, CONTEXT + 2 * DECODES + HOST, each, adapters)
        if name == "masks":
            rows.allowed = np.full((1, -(-EIGHT.vocab // 32)), 0x5555_5555, np.uint32)
        seconds, _ = _decoded(rows)
        yield name, {"ms": 1e3 * seconds, "host_us": 1e6 * float(np.median(_queued(rows)))}
        made.forward.release_units()


def longest_kernels(made: ModelExecutor, batch: int) -> dict[str, float]:
    """Returns the milliseconds of a decode step in each of the 14 kernels that take longest, by name."""
    rows = Rows(made, batch, CONTEXT + DECODES)
    rows.fill(CONTEXT)
    first = np.ones(batch, np.int32)
    rows.decode(first, 2)
    steps = 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        rows.decode(first, steps)
        torch.cuda.synchronize()
    made.forward.release_units()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return {f"{event.key[:60]} x{event.count}": event.self_device_time_total / 1e3 / steps for event in events[:14]}


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
    made.forward.release_units()
    return {
        "tokens": PROMPT,
        "ms": 1e3 * seconds,
        "tokens_s": PROMPT / seconds,
        "of_rate": work / seconds / rate,
    }


def products(bandwidth: float, rate: float) -> Iterator[tuple[str, dict[str, float]]]:
    """Measures products with quantized matrices of the model's shapes, beside PyTorch's with bfloat16. `of_limit`: the
    time that the bytes of weights or the operations take at least, over the measured time."""
    for outputs, inputs in MATRICES:
        plain = [torch.randn(outputs, inputs, device=CUDA, dtype=HALF) for _ in range(3)]
        for name, kind in TYPES.items():
            own = [filled(kind, outputs, inputs) for _ in range(max(2, UNCACHED // (outputs * inputs // 2)))]
            for rows in PRODUCT_ROWS:
                x = torch.randn(rows, inputs, device=CUDA, dtype=HALF)
                ours = captured(partial(quantized.linear, x), own)
                torchs = captured(partial(functional.linear, x), plain)
                least = max(own[0].bytes / bandwidth, 2 * rows * outputs * inputs / rate)
                figures = {"us": 1e6 * ours, "of_limit": least / ours, "bfloat16_us": 1e6 * torchs}
                yield f"{name}, {inputs} to {outputs}, {rows} rows", figures


def filled(kind: Grouped | Kind, outputs: int, inputs: int) -> Quantized:
    """Returns a random matrix of one of `TYPES` on the device."""
    numbers = type_of(kind, inputs)
    assert numbers is not None
    found = numbers.empty(outputs, CUDA)
    QuantizedPlace(found, 0, outputs).fill(random_matrix(np.random.default_rng(0), kind, outputs, inputs))
    return found


def recurrent(bandwidth: float) -> Iterator[tuple[str, dict[str, float]]]:
    """Measures decode steps of recurrent layers. `of_bandwidth`: the time to read and write the states once, over the
    measured time."""
    made: dict[str, Callable[[int], tuple[Callable[[], object], int]]] = {
        "gated delta net": _delta,
        "Mamba-2": _mamba2,
        "Mamba": _mamba,
    }
    for name, make in made.items():
        for rows in RECURRENT_ROWS:
            work, moved = make(rows)
            seconds = captured(lambda each: each(), [work] * 8)
            yield f"{name}, {rows} rows", {"us": 1e6 * seconds, "of_bandwidth": moved / seconds / bandwidth}


def experts(bandwidth: float, rate: float) -> Iterator[tuple[str, dict[str, float]]]:
    """Measures the experts of a layer of Qwen3-30B-A3B, which tokens choose at random. `of_limit`: the time that the
    bytes of chosen experts or the operations take at least, over the measured time."""
    count, chosen, hidden, width = EXPERTS
    shapes = (count * 2 * width, hidden), (count * hidden, width)
    for name in ("bfloat16", "int4", "fp8", "mxfp4"):
        inner, down = (
            filled(TYPES[name], *shape) if name in TYPES else torch.randn(*shape, device=CUDA, dtype=HALF)
            for shape in shapes
        )
        size = sum(each.bytes if isinstance(each, Quantized) else 2 * each.numel() for each in (inner, down))
        for rows in EXPERTS_ROWS:
            x, weights = (torch.randn(rows, each, device=CUDA, dtype=HALF) for each in (hidden, chosen))
            ids = torch.rand(rows, count, device=CUDA).topk(chosen, dim=1).indices
            work = partial(mix_experts, x, ids, weights, inner, down, count, None)
            seconds = captured(work, ["silu"] * 8)
            read = len(set(ids.flatten().tolist()))
            least = max(size / count * read / bandwidth, 6 * hidden * width * ids.numel() / rate)
            yield f"{name}, {rows} rows", {"us": 1e6 * seconds, "of_limit": least / seconds}


def _slots(rows: int, convolution: tuple[int, ...], recurrent: tuple[int, ...]) -> tuple[Slots, int]:
    """Returns slots with random states for `rows` rows, each written where it was read, and the bytes that a step
    moves."""
    first = torch.randn(rows, *convolution, device=CUDA, dtype=HALF)
    second = torch.randn(rows, *recurrent, device=CUDA)
    each = torch.arange(rows, device=CUDA)
    return Slots(first, second, each, each), 2 * sum(part.numel() * part.element_size() for part in (first, second))


def _delta(rows: int) -> tuple[Callable[[], object], int]:
    """Returns a step of Qwen3-Next's layer, and the bytes of its states."""
    channels = 2 * 16 * 128 + 32 * 128
    slots, moved = _slots(rows, (channels, 3), (32, 128, 128))
    inputs, weight = (torch.randn(*shape, device=CUDA, dtype=HALF) for shape in ((rows, channels), (channels, 1, 4)))
    strengths, rates = torch.randn(rows, 64, device=CUDA, dtype=HALF), torch.randn(32, device=CUDA)

    def work() -> torch.Tensor:
        convolved, _ = convolve_step(inputs, strengths, weight, None, slots)
        return gated_delta_step(convolved, strengths, rates, rates, slots, 16)

    return work, moved


def _mamba2(rows: int) -> tuple[Callable[[], object], int]:
    """Returns a step of the 2.7B model's layer, and the bytes of its states."""
    channels = 80 * 64 + 2 * 128
    slots, moved = _slots(rows, (channels, 3), (80, 64, 128))
    inputs, weight = (torch.randn(*shape, device=CUDA, dtype=HALF) for shape in ((rows, channels), (channels, 1, 4)))
    steps, each = torch.randn(rows, 80, device=CUDA, dtype=HALF), torch.randn(80, device=CUDA)

    def work() -> torch.Tensor:
        return mamba2_step(convolve_step(inputs, steps, weight, None, slots)[0], steps, each, each, each, slots)

    return work, moved


def _mamba(rows: int) -> tuple[Callable[[], object], int]:
    """Returns a step of the 2.8B model's layer, and the bytes of its states."""
    channels, size = 5120, 16
    slots, moved = _slots(rows, (channels, 3), (channels, size))
    inputs, weight = (torch.randn(*shape, device=CUDA, dtype=HALF) for shape in ((rows, channels), (channels, 1, 4)))
    b, c = torch.randn(2, rows, size, device=CUDA, dtype=HALF)
    rates, each = torch.randn(channels, size, device=CUDA), torch.randn(channels, device=CUDA)

    def work() -> torch.Tensor:
        return mamba_step(
            convolve_step(inputs, inputs[:, :0], weight, None, slots)[0], inputs, each, b, c, rates, each, slots
        )

    return work, moved


def parking(made: ModelExecutor) -> dict[str, float]:
    """Measures the bandwidth with which pages move to the host and back, beside the limit of pinned copies."""
    count = PARKED // made.unit_bytes(0)
    made.prepare((count,), 1)
    units = np.arange(count, dtype=np.int32)
    moved = count * made.unit_bytes(0)
    data = made.read_units(0, units)
    out = repeated(lambda: _seconds(lambda: made.read_units(0, units)), 3).median
    back = repeated(lambda: _seconds(lambda: made.write_units(0, units, list(data))), 3).median
    host, device = queue().pinned(moved), torch.empty(moved, dtype=torch.uint8, device=CUDA)
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
