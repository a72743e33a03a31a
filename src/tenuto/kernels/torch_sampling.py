"""Samples tokens with PyTorch, on any device: the reference for faster kernels."""

from __future__ import annotations

import numpy as np
import torch

from tenuto.base.sampling import LEAST_LOGPROB
from tenuto.kernels.sampling import Choice, Floats, Longs, Masks

_CANDIDATES = 1024
"""The number of likeliest tokens that are examined first. If they do not decide which tokens are kept, all are
sorted."""


def mask(logits: torch.Tensor, masks: Masks) -> None:
    """Sets the logits, float32 [rows, vocab], of forbidden tokens to minus infinity, in place. A mask that forbids all
    tokens changes nothing."""
    vocab = logits.shape[-1]
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, count=vocab, bitorder="little")
    bits[~bits.any(axis=1)] = 1
    places = torch.from_numpy(masks.rows).to(logits.device)
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    logits[places] = logits[places].masked_fill_(forbidden, -torch.inf)


def sample(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Samples one token per row. `logits` is float32 [rows, vocab]. Returns int64 [rows] on the same device.

    A greedy row takes the first of the tokens with the highest logit. Among equally likely tokens at the edge of top-k
    or top-p, the ones that are kept are unspecified, but always the same for the same logits. NaN among the logits
    leads to some token rather than an error: the request that caused it must not fail the batch.
    """
    drawn = np.flatnonzero(choice.temperature > 0)
    if len(drawn) == len(logits) > 0:
        return _draw(logits, choice)
    tokens = logits.argmax(dim=-1)
    if len(drawn) == 0:
        return tokens
    places = torch.from_numpy(drawn).to(logits.device)
    return tokens.index_copy_(0, places, _draw(logits.index_select(0, places), choice.rows(drawn)))


def _draw(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Draws tokens by inverting the cumulative distribution over the kept tokens, in order of their ids."""
    below = kept_probabilities(logits, choice).cumsum(dim=-1)
    targets = below[:, -1:] * torch.from_numpy(choice.uniform).to(logits.device)[:, None]
    return torch.searchsorted(below, targets, right=True).squeeze(1).clamp_(max=logits.shape[-1] - 1)


def kept_probabilities(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Returns the probabilities that rows with a temperature draw from, float64 [rows, vocab]: those after temperature,
    or zero for tokens that the other options exclude. They are not normalised again. `logits` is float32 [rows,
    vocab]."""
    device, vocab = logits.device, logits.shape[-1]
    # Logits are shifted so that the highest is 0, because dividing by a tiny temperature could overflow.
    shifted = logits.double() - logits.max(dim=-1, keepdim=True).values
    probabilities = (shifted / torch.from_numpy(choice.temperature).to(device)[:, None]).softmax(dim=-1)
    limited = np.flatnonzero((choice.top_k > 0) & (choice.top_k < vocab) | (choice.top_p < 1))
    if len(limited):
        _limit(probabilities, limited, choice.top_k, choice.top_p)
    if choice.min_p.any():
        least = probabilities.amax(dim=-1) * torch.from_numpy(choice.min_p).to(device)
        probabilities.masked_fill_(probabilities < least[:, None], 0.0)
    return probabilities


def _limit(probabilities: torch.Tensor, rows: Longs, top_k: Longs, top_p: Floats) -> None:
    """Sets the probabilities that the options of `rows` exclude to zero, in place; float64 [all rows, vocab]."""
    device, vocab = probabilities.device, probabilities.shape[-1]
    for width in (min(_CANDIDATES, vocab), vocab):
        places = torch.from_numpy(rows).to(device)
        chosen = probabilities.index_select(0, places)
        values, tokens = chosen.topk(width, dim=-1)
        most = np.where(top_k[rows] > 0, top_k[rows], vocab)
        values.masked_fill_(torch.arange(width, device=device) >= torch.from_numpy(most).to(device)[:, None], 0.0)
        cumulative = values.cumsum(dim=-1)
        # Without top-k, top-p is a share of all tokens, not only of the candidates.
        total = torch.where(torch.from_numpy(most <= width).to(device), cumulative[:, -1], chosen.sum(dim=-1))
        share = torch.from_numpy(top_p[rows]).to(device) * total
        values.masked_fill_(cumulative - values >= share[:, None], 0.0)
        settled = (most <= width) | (cumulative[:, -1] >= share).cpu().numpy()
        done = torch.from_numpy(settled).to(device)
        probabilities.index_copy_(0, places[done], torch.zeros_like(chosen).scatter_(1, tokens, values)[done])
        rows = rows[~settled]
        if len(rows) == 0:
            return


def score(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the log-probabilities of `tokens`, int64 [rows], by `logits`, float32 [rows, vocab]: float32 [rows]; then
    the ids, int64, and log-probabilities, float32, of the `most` likeliest tokens, or of all, in descending order, both
    [rows, most]. NaN and values below `LEAST_LOGPROB` become `LEAST_LOGPROB`. The choice among equally likely tokens at
    the edge is unspecified."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]) - total
    values, ids = logits.topk(min(most, logits.shape[-1]), dim=-1)
    return _clamped(chosen).squeeze(1), ids, _clamped(values - total)


def _clamped(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=LEAST_LOGPROB).clamp(LEAST_LOGPROB, 0.0)
