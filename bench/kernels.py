"""`python -m bench.kernels`: steps of the default model, or of larger ones, with all kernels that this machine can run.

A decode step takes at least the time for reading the weights once, and the keys and values of all sequences. This limit
is measured in the same run, by PyTorch reading as many bytes with as many threads. A prefill takes at least the time
for multiplying, without attention, at the rate of the CPU's instructions in registers (`bench.multiplications`).
Figures are medians, with the fastest and the slowest in brackets; these are close together on a quiet machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from bench.multiplications import multiplications
from bench.random_models import EIGHT, ONE, TYPES, stored
from bench.spread import Spread, repeated
from tenuto.base.config import DEFAULT_MODEL, cache_dir
from tenuto.base.plan import Ints, PageCopies, Plan, RowSampling, TableChanges
from tenuto.base.sampling import GREEDY
from tenuto.exec.device import usable_cores
from tenuto.exec.forward import Forward
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.kernels.elements import KVCacheDtype
from tenuto.kernels.native.build import VARIANTS, Machine, library
from tenuto.kernels.native.library import OpKind, loaded
from tenuto.models.adapter import projections
from tenuto.models.config import Attention, ModelConfig
from tenuto.models.native.program import NativeProgram
from tenuto.models.store import resolve

PAGE = 32
NO_INTS = np.zeros(0, np.int32)
DECODES = ((1, 0), (1, 512), (1, 3072), (4, 512), (16, 512), (32, 512))
"""Rows and context of the decode steps that are measured."""


SHAPES = {"1B": ONE, "8B": EIGHT}
"""Larger models, whose layers' matrices have 4 bits in groups of 128 and whose other weights are bfloat16."""
CHUNK = 512
"""Tokens computed per step when sequences are filled."""


class Steps:
    """Rows of one executor, each with its own `context` token slots."""

    def __init__(self, executor: ModelExecutor, rows: int, context: int, vocab: int = 40_000) -> None:
        self.executor = executor
        self._pages = pages = -(-context // PAGE)
        executor.prepare((rows * pages,), rows)
        table = np.arange(rows * pages, dtype=np.int32)
        self._table = TableChanges(table // pages, table % pages, table)
        self._filled = np.zeros(rows, np.int32)  # leading pages of each row whose tokens have been computed
        self._sampling = tuple((row, RowSampling(GREEDY)) for row in range(rows))
        self._tokens = np.random.default_rng(0).integers(0, vocab, 10_000).astype(np.int32)

    def fill(self, rows: int, context: int) -> None:
        """Gives `rows` rows the state of at least `context` tokens: the first row computes it, the others get copies.
        Reading memory that was never written would be too fast: the system maps all of it to one page of zeros. And
        writing it for the first time would be too slow."""
        pages = -(-context // PAGE)
        for start in range(int(self._filled[0]) * PAGE, pages * PAGE, CHUNK):
            self.run(1, start, min(CHUNK, pages * PAGE - start))
        for row in range(1, rows):
            for page in range(int(self._filled[row]), pages):
                state = self.executor.read_units(0, np.array([page], np.int32))
                self.executor.write_units(0, np.array([row * self._pages + page], np.int32), list(state))
            self._filled[row] = max(self._filled[row], pages)

    def run(self, rows: int, start: int, count: int, adapters: Ints | None = None) -> float:
        """Runs a step in which `rows` rows compute `count` tokens from position `start` on and sample one. Returns its
        seconds. `adapters`: as in `Plan`."""

        def each(value: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
            return np.full(rows, value, np.int32)

        copies = PageCopies(NO_INTS, NO_INTS, NO_INTS)
        ids = np.arange(rows, dtype=np.int32)
        plan = Plan(
            step=1,
            rows=ids,
            starts=each(start),
            counts=each(count),
            tokens=self._tokens[: rows * count],
            samples=each(1),
            tables=(self._table,),
            copies=(copies,),
            states=(),
            sampling=self._sampling,
            adapters=adapters,
        )
        self._table, self._sampling = TableChanges(NO_INTS, NO_INTS, NO_INTS), ()
        reached = (start + count) // PAGE
        self._filled[:rows][(start <= self._filled[:rows] * PAGE) & (self._filled[:rows] < reached)] = reached
        began = time.perf_counter()
        self.executor.submit(plan)
        self.executor.collect()
        return time.perf_counter() - began


@contextmanager
def executor_of(kernels: str, kv_cache_dtype: str = "auto", shape: str | None = None) -> Iterator[ModelExecutor]:
    """Gives an executor with `kernels` and keys and values of type `kv_cache_dtype`, of the default model, or of a
    `shape` of `SHAPES` with random weights."""
    cache = cache_dir()
    if shape is None:
        options = ExecutorOptions(PAGE, kernels=kernels, kv_cache_dtype=kv_cache_dtype, cache=cache, say=print)
        executor = load_executor(resolve(DEFAULT_MODEL, cache), options)
    else:
        config = SHAPES[shape]
        weights = stored(config, TYPES["int4"])
        program = NativeProgram(config, weights, PAGE, kv_cache_dtype=KVCacheDtype(kv_cache_dtype))
        native = loaded(library(cache, Machine.this(), kernels, print))
        executor = ModelExecutor(NativeForward(native, program, usable_cores()))
    try:
        yield executor
    finally:
        executor.close()


def read_seconds(size: int) -> float:
    """Returns the shortest measured time for reading `size` bytes."""
    block = torch.ones(size // 4)
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - began)
    return best


def product_seconds(multiplications: int) -> float:
    """Returns the shortest time PyTorch takes for this number of multiplications in products of bfloat16 matrices."""
    size, best = 1024, float("inf")
    matrix = torch.ones((size, size), dtype=torch.bfloat16)
    for _ in range(10):
        began = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - began)
    return best * multiplications / size**3


def prefill_multiplications(config: ModelConfig, tokens: int) -> int:
    """Returns the number of multiplications by weights that a prefill takes, without the head. The last feed-forward
    network computes only the last token."""
    sizes = {name: outputs * inputs for name, (outputs, inputs) in projections(config).items()}
    last = f"model.layers.{len(config.layers) - 1}.mlp."
    return sum(size * (1 if name.startswith(last) else tokens) for name, size in sizes.items())


def shares(forward: Forward) -> str:
    """Describes how the time in native operations since the last call was divided, in per cent."""
    if not isinstance(forward, NativeForward):
        return "unknown"
    spent = [(seconds, kind.name.lower()) for kind, seconds in zip(OpKind, forward.op_seconds, strict=True)]
    total = sum(seconds for seconds, _ in spent) or 1.0
    forward.op_seconds[:] = 0
    return ", ".join(f"{name} {100 * seconds / total:.0f}" for seconds, name in sorted(spent, reverse=True)[:6])


@dataclass(frozen=True, slots=True)
class Decode:
    """A step that adds one token to each of `rows` sequences of `context` tokens. `bytes`: size of weights, keys and
    values it reads; 0 if unknown. `seconds`: time of a step. `limit`: seconds for reading as many bytes."""

    rows: int
    context: int
    bytes: int
    seconds: Spread
    limit: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """A step that computes the first `tokens` of a sequence. `seconds`: time of a step."""

    tokens: int
    seconds: Spread


@dataclass(frozen=True, slots=True)
class Turn:
    """A step that computes `tokens` of a sequence after `context` others. `seconds`: time of a step. `attention`:
    estimated seconds for attention: its share of the step's reads, timed by `read_seconds`, and its multiplications,
    timed by `product_seconds`."""

    tokens: int
    context: int
    seconds: Spread
    attention: float


class Figures:
    """Measures steps of one executor, each `times` times."""

    def __init__(self, executor: ModelExecutor, times: int) -> None:
        forward = executor.forward
        self.description = forward.description
        self.token_bytes = executor.spec.groups[0].bytes_per_unit // PAGE
        config = forward.config
        apart = 0 if config.tied else 2 * config.vocab * config.hidden  # an embedding of which steps read few rows
        self.weight_bytes = forward.weight_bytes - apart if isinstance(forward, NativeForward) else 0
        layers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, Attention)]
        self.config = config
        self._per_pair = sum(2 * layer.heads * layer.head_dim for layer in layers)  # multiplications per pair of tokens
        self._steps = Steps(executor, rows=32, context=3200)
        self._times = times

    def decode(self, rows: int, context: int) -> Decode:
        """Measures a decode step and its limit."""
        size = self.weight_bytes + rows * context * self.token_bytes if self.weight_bytes else 0
        seconds = self._step(rows, context, 1)
        return Decode(rows, context, size, seconds, read_seconds(size) if size else 0.0)

    def prefill(self, tokens: int) -> Prefill:
        """Measures the prefill of an empty sequence."""
        return Prefill(tokens, self._step(1, 0, tokens))

    def turns(self, contexts: Sequence[int], tokens: int) -> tuple[Turn, ...]:
        """Measures the first steps of turns: `tokens` after each of `contexts`. Contexts alternate, so that a slow
        period of the machine affects all of them."""
        self._steps.fill(1, max(contexts) + tokens)
        shares(self._steps.executor.forward)  # count only the steps that follow
        rounds = [[self._steps.run(1, context, tokens) for context in contexts] for _ in range(self._times + 1)]
        each = zip(contexts, zip(*rounds[1:], strict=True), strict=True)  # the first round is a warm-up
        return tuple(
            Turn(tokens, context, Spread.of(seconds), self._attention(context, tokens)) for context, seconds in each
        )

    def _attention(self, context: int, tokens: int) -> float:
        kept = (context + tokens) * self.token_bytes
        size = self.weight_bytes + kept  # keys and values alone might stay in a cache that the weights evict them from
        products = tokens * (context + tokens // 2) * self._per_pair
        return read_seconds(size) * kept / size + product_seconds(products)

    def _step(self, rows: int, start: int, count: int) -> Spread:
        self._steps.fill(rows, start + count)
        shares(self._steps.executor.forward)  # count only the steps that follow
        return repeated(lambda: self._steps.run(rows, start, count), self._times)


def show(kernels: str, kv_cache_dtype: str, times: int, shape: str | None = None) -> None:
    """Prints the figures of `kernels`."""
    with executor_of(kernels, kv_cache_dtype, shape) as executor:
        figures, forward = Figures(executor, times), executor.forward
        sizes = f"weights {figures.weight_bytes / 1e6:.0f} MB, {figures.token_bytes} bytes a token"
        print(f"\n{figures.description}; {sizes}")
        spent = figures.prefill(512).seconds.median
        made = prefill_multiplications(figures.config, 512) / spent
        print(f"prefill of 512  {512 / spent:8.0f} tokens/s{_of_multiplications(kernels, made)}")
        print(f"  of it  {shares(forward)}")
        print(f"48 after 3,072  {figures.turns([3072], 48)[0].seconds.scaled(1e3).shown('7.2f')} ms")
        print(f"  of it  {shares(forward)}")
        for rows, context in DECODES:
            one = figures.decode(rows, context)
            ratio = (
                f"  {one.seconds.median / one.limit:5.2f} times the limit, {1e3 * one.limit:.2f}" if one.limit else ""
            )
            print(f"decode {rows:2} at {context:4}  {one.seconds.scaled(1e3).shown('7.2f')} ms{ratio}")
            print(f"  of it  {shares(forward)}")


def _of_multiplications(kernels: str, made: float) -> str:
    """Describes multiplications a second as a part of those that are possible; nothing for PyTorch."""
    if kernels not in VARIANTS:
        return ""
    possible = multiplications(kernels, usable_cores())
    return f"  {made / possible:5.2f} of {possible / 1e9:.0f} billion multiplications/s"


def main() -> None:
    """Prints the figures of the chosen kernels."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("kernels", nargs="*", help="by default all native ones that this machine can run, and torch")
    parser.add_argument("--times", type=int, default=15, help="number of measurements for each figure")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=list(KVCacheDtype), help="native kernels only")
    parser.add_argument("--shape", choices=SHAPES, help="of a larger model with random weights; native kernels only")
    arguments = parser.parse_args()
    native = Machine.this().variants()
    everything = native if arguments.kv_cache_dtype != "auto" or arguments.shape else [*native, "torch"]
    for kernels in arguments.kernels or everything:
        show(kernels, arguments.kv_cache_dtype, arguments.times, arguments.shape)


if __name__ == "__main__":
    main()
