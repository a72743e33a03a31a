"""On the default model in float32, every position's logits match transformers, however prompts are cut and paged.

All 49,152 logits are compared at every position of two prompts, 800 tokens of real text and 300 random tokens, computed
side by side: in chunks of 512 on pages of 1 token and of 64 on pages of 64; and on pages of 16 in chunks of 7 beside
token by token (prefills beside decodes), both from the first token and at the end of a long prompt. transformers reads
the model file independently and computes each prompt whole.

Tolerance: 3e-3 at most and 5e-5 on average, on logits of up to 36. On 400 random tokens, transformers in float32
differs from itself in float64 by 5e-4 at most and 9e-6 on average, and so do we.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.torch_forward import TorchForward
from tenuto.models.decoder import Decoder
from tests.exec.driver import Driver, logits_of

ATOL, MEAN_ATOL = 3e-3, 5e-5


@dataclass(frozen=True)
class Row:
    """The first `length` tokens of a prompt: `at_once` in the first step, then `chunk` in each."""

    prompt: int
    chunk: int
    length: int
    at_once: int = 0

    def next_stop(self, start: int) -> int:
        """Returns the end of the step that begins at `start`."""
        return min(start + (self.chunk if start or not self.at_once else self.at_once), self.length)


SMALL_STEPS = [Row(0, 7, 600, at_once=432), Row(1, 7, 161), Row(0, 1, 24), Row(1, 1, 299, at_once=276)]
"""24 steps: chunks and single tokens, at the beginning and after many pages; both cross pages."""


def rows(chunk: int) -> list[Row]:
    return [Row(0, chunk, 800), Row(1, chunk, 300)]


@pytest.fixture(scope="module")
def prompts(licence_tokens: list[int]) -> list[list[int]]:
    return [licence_tokens[:800], np.random.default_rng(0).integers(0, 49152, 300).tolist()]


@pytest.fixture(scope="module")
def expected_logits(reference: LlamaForCausalLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Returns the logits of each prompt, float32 [tokens, vocab]; a prefix has the prefix's logits."""
    with torch.inference_mode():
        return [reference(torch.tensor([tokens])).logits[0] for tokens in prompts]


@pytest.fixture
def driver(model: Decoder, page_size: int) -> Iterator[Driver]:
    executor = ModelExecutor(TorchForward(model, page_size))
    yield Driver(executor, pages=-(-1200 // page_size) + 3, rows=4)
    executor.close()


@pytest.mark.parametrize(
    ("page_size", "rows"),
    [(1, rows(512)), (16, SMALL_STEPS), (64, rows(64))],
    ids=["page1-chunk512", "page16-chunk7-and-1", "page64-chunk64"],
)
def test_logits_match_transformers_at_every_position(
    driver: Driver, prompts: list[list[int]], expected_logits: list[torch.Tensor], rows: list[Row]
) -> None:
    most, total, compared = 0.0, 0.0, 0
    while any(done < row.length for row, done in zip(rows, driver.lengths, strict=False)):
        work, theirs = [], []
        for i, row in enumerate(rows):
            start = driver.lengths[i]
            stop = row.next_stop(start)
            if start < stop:
                work.append((i, prompts[row.prompt][start:stop], stop - start))
                theirs.append(expected_logits[row.prompt][start:stop])
        differences = (logits_of(driver.executor, driver.plan(work)) - torch.cat(theirs)).abs_()
        most = max(most, differences.max().item())
        total += differences.sum(dtype=torch.float64).item()
        compared += len(differences)
    mean = total / compared / 49152
    figures = f"logits after {compared} tokens differ by at most {most:.1e}, {mean:.1e} on average"
    print(figures)
    assert compared == sum(row.length for row in rows)
    assert most <= ATOL, figures
    assert mean <= MEAN_ATOL, figures
