"""`python -m bench.hybrid_rates`: the speed of a hybrid model, compared with transformers and the memory's limit.

The model has Granite 4's architecture and random bfloat16 weights: Mamba-2 layers and a few full attention layers, 207
million parameters. A decode step takes at least the time for reading the weights once, and of every sequence the keys
and values once and the states twice, since they are also written. This limit is measured in the same run, by PyTorch
reading as many bytes with as many threads. Figures are medians, with the fastest and the slowest in brackets. In steps
with guesses all are right, as they were in the steps before, whose inputs are absorbed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM
from transformers.utils import logging

from bench.kernels import read_seconds, shares
from bench.spread import Spread, repeated
from tenuto.base.config import cache_dir
from tenuto.base.plan import NO_SLOT, PageCopies, Plan, RowSampling, StateMoves, TableChanges
from tenuto.base.sampling import GREEDY
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.models.store import resolve

PAGE = 32
CONTEXT, CHUNK = 1024, 512
DECODES = ((1, 512), (4, 512), (16, 512))
GUESSES = (1, 3, 7)
NO_INTS = np.zeros(0, np.int32)
VOCABULARY = 16_384


def model() -> GraniteMoeHybridForCausalLM:
    """Returns the model: 24 layers, of which every sixth is full attention."""
    kinds = ["full_attention" if i % 6 == 5 else "linear_attention" for i in range(24)]
    config = GraniteMoeHybridConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        shared_intermediate_size=2048,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=0,
        mamba_n_heads=24,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_expand=2,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    made: GraniteMoeHybridForCausalLM = GraniteMoeHybridForCausalLM(config)
    torch.nn.Module.to(made, torch.bfloat16)
    torch.nn.Module.eval(made)
    return made


class Steps:
    """Rows of one executor, each with its own pages for `CONTEXT` tokens and its own state slot."""

    def __init__(self, executor: ModelExecutor, rows: int) -> None:
        self.executor = executor
        self.groups = executor.spec.groups
        pages = CONTEXT // PAGE
        units = tuple(rows * pages if group.paged else rows for group in self.groups)
        executor.prepare(units, rows, lookahead=max(GUESSES))
        entries = np.arange(rows * pages, dtype=np.int32)
        self._table = TableChanges(entries // pages, entries % pages, entries)
        self._sampling = tuple((row, RowSampling(GREEDY)) for row in range(rows))
        self._tokens = np.random.default_rng(0).integers(0, VOCABULARY, CONTEXT * rows).astype(np.int32)

    def fill(self, rows: int, context: int) -> None:
        """Gives `rows` rows the state of `context` tokens. Reading memory that was never written would be too fast: the
        system maps all of it to one page of zeros."""
        for start in range(0, context, CHUNK):
            self.run(rows, start, CHUNK)

    def run(self, rows: int, start: int, count: int, absorbed: int | None = None) -> float:
        """Runs a step in which `rows` rows compute `count` tokens from position `start` on and sample one. Unless
        `absorbed` is None, all tokens but the first are guesses, and the rows first absorb so many inputs. Returns the
        step's seconds."""
        ids, guessed = np.arange(rows, dtype=np.int32), int(absorbed is not None)
        reads = ids if start else np.full(rows, NO_SLOT, np.int32)
        absorbs, keeps = np.full(rows, absorbed or 0, np.int32), np.full(rows, guessed, np.int32)
        paged = sum(group.paged for group in self.groups)
        plan = Plan(
            step=1,
            rows=ids,
            starts=np.full(rows, start, np.int32),
            counts=np.full(rows, count, np.int32),
            tokens=self._tokens[: rows * count],
            samples=np.full(rows, count if guessed else 1, np.int32),
            tables=(self._table,) * paged,
            copies=(PageCopies(NO_INTS, NO_INTS, NO_INTS),) * paged,
            states=(StateMoves(reads, ids, absorbs, keeps),) * (len(self.groups) - paged),
            sampling=self._sampling,
        )
        self._table, self._sampling = TableChanges(NO_INTS, NO_INTS, NO_INTS), ()
        began = time.perf_counter()
        self.executor.submit(plan)
        self.executor.collect()
        return time.perf_counter() - began

    def bytes_read(self, rows: int, context: int, weights: int) -> int:
        """Returns the bytes that a decode reads, plus those it writes to states."""
        each = sum(
            context // PAGE * group.bytes_per_unit if group.paged else 2 * group.bytes_per_unit for group in self.groups
        )
        return weights + rows * each


@torch.inference_mode()
def theirs(reference: GraniteMoeHybridForCausalLM, rows: int, times: int) -> tuple[Spread, Spread]:
    """Returns transformers' seconds for a prefill of `CHUNK` tokens in one row, and for a decode of `rows` rows after
    as many tokens."""
    tokens = torch.randint(0, VOCABULARY, (rows, CHUNK))

    def timed(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    prefill = repeated(lambda: timed(lambda: reference(tokens[:1], logits_to_keep=1)), times)
    cache = reference(tokens, use_cache=True, logits_to_keep=1).past_key_values
    one = tokens[:, :1]
    decode = repeated(lambda: timed(lambda: reference(one, past_key_values=cache, use_cache=True)), times)
    return prefill, decode


def main() -> None:
    """Prints the figures of all kernels and of transformers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", default=["auto", "torch"])
    parser.add_argument("--times", type=int, default=7, help="number of measurements for each figure")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    reference = model()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        reference.save_pretrained(directory)
        print(
            f"{sum(p.numel() for p in reference.parameters()):,} parameters, {torch.get_num_threads()} threads of torch"
        )
        for kernels in options.kernels:
            files = resolve(name, directory)
            dtype = "bfloat16" if kernels == "torch" else None
            executor = load_executor(
                files, ExecutorOptions(PAGE, dtype=dtype, kernels=kernels, cache=cache_dir(), say=print)
            )
            ours(executor, options.times)
            executor.close()
    print("\ntransformers in bfloat16")
    for rows, _ in DECODES:
        prefill, decode = theirs(reference, rows, options.times)
        if rows == 1:
            print(f"prefill of {CHUNK}: {prefill.scaled(1e3).shown()} ms, {CHUNK / prefill.median:,.0f} tokens/s")
        print(f"decode of {rows:>2} at {CHUNK}: {decode.scaled(1e3).shown()} ms")


def ours(executor: ModelExecutor, times: int) -> None:
    """Prints the figures of one executor."""
    forward = executor.forward
    print(f"\n{forward.description}")
    steps = Steps(executor, rows=max(rows for rows, _ in DECODES))
    prefill = repeated(lambda: steps.run(1, 0, CHUNK), times)
    print(f"prefill of {CHUNK}: {prefill.scaled(1e3).shown()} ms, {CHUNK / prefill.median:,.0f} tokens/s")
    print(f"  per cent of it: {shares(forward)}")
    steps.fill(max(rows for rows, _ in DECODES), max(context for _, context in DECODES))
    shares(forward)  # count only the decodes that follow
    for rows, context in DECODES:
        decode = repeated(lambda rows=rows, context=context: steps.run(rows, context, 1), times)  # type: ignore[misc]
        line = f"decode of {rows:>2} at {context}: {decode.scaled(1e3).shown()} ms"
        if isinstance(forward, NativeForward):
            size = steps.bytes_read(rows, context, forward.weight_bytes)
            limit = read_seconds(size)
            line += f", {decode.median / limit:.2f} times the {1e3 * limit:.1f} ms of reading {size / 1e6:.0f} MB"
        print(line)
        for guesses in GUESSES:
            count = 1 + guesses
            steps.run(rows, context, count, 0)
            right = repeated(lambda: steps.run(rows, context, count, count), times)  # noqa: B023 - called at once
            print(
                f"  with {guesses} right guesses {right.scaled(1e3).shown()} ms: "
                f"{count * decode.median / right.median:.2f} times the tokens/s"
            )
    print(f"  per cent of these: {shares(forward)}")


if __name__ == "__main__":
    main()
