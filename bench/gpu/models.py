"""Models with random weights, their executors, and rows that compute on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tenuto.base.plan import PREVIOUS_SAMPLE, Ints, PageCopies, Plan, RowSampling, StateMoves, TableChanges
from tenuto.base.sampling import GREEDY, Sampling
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.gpu.queue import CudaQueue
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.gpu.fused import FUSED
from tenuto.kernels.native.formats import PanelFormat
from tenuto.kernels.native.grouped import Grouped
from tenuto.models.config import Attention, GatedDelta, Layer, Mixer, Mlp, ModelConfig
from tenuto.models.decoder import Decoder
from tenuto.models.rope import Rope
from tenuto.models.weights import FLOATS, StoredWeight, bfloat16_bits

PAGE = 32
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


TYPES = {
    "int4": Grouped(PanelFormat.INT4, 128, halves=True),
    "int4 with zeros": Grouped(PanelFormat.INT4, 128),
    "int8": Grouped(PanelFormat.INT8, 4096, halves=True),
    "fp8": Grouped(PanelFormat.FP8, 128),
}
"""Types of quantized weights, by their names in a report."""


def stored(config: ModelConfig, kind: Grouped | None, seed: int = 0) -> Iterator[tuple[str, StoredWeight]]:
    """Yields random weights of a model that has attention and a gated network in every layer, the same for the same
    seed. Matrices of layers are of type `kind`; other weights, or all, are bfloat16. Values of large ones repeat."""
    draw = np.random.default_rng(seed)

    def plain(*shape: int) -> StoredWeight:
        some = draw.normal(size=2**20) * shape[-1] ** -0.5 if len(shape) > 1 else draw.uniform(0.5, 1.5, shape)
        return StoredWeight.of(np.resize(bfloat16_bits(some.astype(np.float32)), shape), FLOATS["BF16"])

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield name, plain(config.vocab, config.hidden)
    yield "model.norm.weight", plain(config.hidden)
    for i, layer in enumerate(config.layers):
        a, m, first = layer.mixer, layer.feed_forward, f"model.layers.{i}."
        assert isinstance(a, Attention)
        assert isinstance(m, Mlp)
        width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
        projected = zip("qkv", (width, kv_width, kv_width), strict=True)
        shapes = {f"self_attn.{part}_proj": (n, config.hidden) for part, n in projected}
        shapes |= {f"mlp.{part}_proj": (m.width, config.hidden) for part in ("gate", "up")}
        shapes |= {"self_attn.o_proj": (config.hidden, width), "mlp.down_proj": (config.hidden, m.width)}
        for part, (outputs, inputs) in shapes.items():
            made = plain(outputs, inputs) if kind is None else random_matrix(draw, kind, outputs, inputs)
            yield f"{first}{part}.weight", made
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{first}{norm}.weight", plain(config.hidden)


def random_matrix(draw: np.random.Generator, kind: Grouped, outputs: int, inputs: int) -> StoredWeight:
    """Returns a random matrix whose weights are about the root of the number of inputs below 1."""
    few, groups = min(outputs, 64), -(-inputs // kind.group)
    data = draw.integers(0, 256, (few, inputs // 32 * kind.numbers.quant_bytes), dtype=np.uint8)
    spread = {PanelFormat.INT4: 4.6, PanelFormat.INT8: 74.0, PanelFormat.FP8: 0.5}[kind.numbers]
    scales = (draw.uniform(0.5, 1.5, (few, groups)) / spread * inputs**-0.5).astype(np.float16).astype(np.float32)
    minima = []
    if kind.numbers is PanelFormat.FP8:
        data &= 0xBF  # below 2
    else:
        minima = [scales * np.float32(-8 if kind.numbers is PanelFormat.INT4 else -128)]
    whole = np.concatenate([data, *(each.view(np.uint8) for each in (scales, *minima))], axis=1)
    return StoredWeight(kind, (outputs, inputs), lambda: np.resize(whole, (outputs, whole.shape[1])))


class TimedQueue(CudaQueue):
    """Notes the seconds that each launch of captured work takes."""

    def __init__(self) -> None:
        super().__init__(CUDA)
        self.seconds: list[float] = []

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        again = super().capture(work)

        def timed() -> None:
            begin = time.perf_counter()
            again()
            self.seconds.append(time.perf_counter() - begin)

        return timed


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
    config: ModelConfig,
    dtype: torch.dtype,
    kind: Callable[..., TorchForward],
    weights: Iterable[tuple[str, StoredWeight]] | None = None,
    queue: CudaQueue | None = None,
) -> Iterator[ModelExecutor]:
    """Yields an executor with `weights`, or else with random ones, always the same."""
    torch.manual_seed(0)
    fused = None if kind is TorchForward else FUSED
    with torch.inference_mode():
        decoder = Decoder(config, weights, CUDA, dtype, fused)
    forward = kind(decoder, PAGE) if kind is TorchForward else kind(decoder, PAGE, queue or CudaQueue(CUDA))
    made = ModelExecutor(forward)
    try:
        yield made
    finally:
        made.close()
