"""Output and log-probabilities of a turn by definition: a naive loop over whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tenuto.base.options import TurnParams
from tenuto.base.sampling import TokenLogprob
from tenuto.kernels.sampling import uniforms
from tests.kernels.reference import Row, reference_kept, reference_logits


@torch.inference_mode()
def raw_logits(model: LlamaForCausalLM, tokens: Sequence[int]) -> np.ndarray:
    return model(torch.tensor([list(tokens)])).logits[0].numpy()


def said(model: LlamaForCausalLM, prompt: list[int], params: TurnParams) -> list[int]:
    """Returns the output by definition, computing the whole sequence for every token."""
    options, output = params.sampling, list[int]()
    for k in range(params.max_new_tokens or 0):
        row = Row(
            options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty,
            options.presence_penalty, options.frequency_penalty, dict(options.logit_bias),
            list(params.stop_ids) if k < params.min_new_tokens else [], prompt, output,
        )  # fmt: skip
        edited = reference_logits(raw_logits(model, prompt + output)[-1], row)
        if options.allowed_ids:
            edited[~np.isin(np.arange(len(edited)), options.allowed_ids)] = -np.inf
        if options.greedy:
            output.append(int(edited.argmax()))
        else:
            kept, _ = reference_kept(edited, row)
            uniform = uniforms(np.array([options.seed]), np.array([len(prompt) + k]))[0]
            output.append(int(np.searchsorted(np.cumsum(kept), uniform, side="right")))
        if output[-1] in params.stop_ids:
            break
    return output


def check_logprobs(
    got: Sequence[TokenLogprob], tokens: Sequence[int], logits: np.ndarray, most: int, named: Sequence[int] = ()
) -> None:
    """Compares `got` with the log-probabilities of `tokens`, each from the logits at the same index."""
    exact = torch.from_numpy(logits.astype(np.float64)).log_softmax(-1).numpy()
    assert [entry.token for entry in got] == list(tokens)
    for entry, expected in zip(got, exact, strict=True):
        assert entry.logprob == pytest.approx(expected[entry.token], abs=5e-4)
        assert len(entry.top) == most
        assert [other.logprob for other in entry.top] == pytest.approx(-np.sort(-expected)[:most], abs=5e-4)
        assert [expected[other.token] for other in entry.top] == pytest.approx(
            [other.logprob for other in entry.top], abs=5e-4
        )
        assert [other.token for other in entry.named] == list(named)
        assert [other.logprob for other in entry.named] == pytest.approx(expected[list(named)], abs=5e-4)
