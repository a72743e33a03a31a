"""Choosing tokens from logits with PyTorch, on any device: the reference for faster kernels."""

from __future__ import annotations

import numpy as np
import torch

from tenuto.base.sampling import LEAST_LOGPROB
from tenuto.kernels.sampling import Choice, Floats, Longs, Masks

_CANDIDATES = 1024
"""How many of the likeliest tokens are looked at first; if they do not settle what is kept, all are sorted."""


def mask(logits: torch.Tensor, masks: Masks) -> None:
    """Set the logits, float32 [rows, vocab], of tokens that are not allowed to minus infinity, in place. A row that may
    sample none keeps all."""
    vocab = logits.shape[-1]
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, count=vocab, bitorder="little")
    bits[~bits.any(axis=1)] = 1
    places = torch.from_numpy(masks.rows).to(logits.device)
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    logits[places] = logits[places].masked_fill_(forbidden, -torch.inf)


def sample(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """One token a row. `logits` is float32 [rows, vocab]. Returns int64 [rows] on the same device.

    Of tokens with equal logits a greedy row takes the first; which of several equally likely ones at the very edge of
    top-k or top-p is kept is unspecified but always the same for the same logits. Logits that are not numbers give
    some token, never an error: the request that caused them must not fail the batch.
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
    """Draw by inverting the cumulative distribution over the tokens kept, in order of their ids."""
    below = kept_probabilities(logits, choice).cumsum(dim=-1)
    targets = below[:, -1:] * torch.from_numpy(choice.uniform).to(logits.device)[:, None]
    return torch.searchsorted(below, targets, right=True).squeeze(1).clamp_(max=logits.shape[-1] - 1)


def kept_probabilities(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """What rows that are not greedy draw from: each token's probability after temperature, or zero if the other options
    exclude it; their sum is not made 1 again. `logits` is float32 [rows, vocab]; returns float64 of that shape."""
    device, vocab = logits.device, logits.shape[-1]
    # The highest logit goes to 0 before the division, or a tiny temperature would overflow.
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
    """Set to zero, in place, what the options of `rows` exclude from `probabilities`, float64 [all rows, vocab]."""
    device, vocab = probabilities.device, probabilities.shape[-1]
    for width in (min(_CANDIDATES, vocab), vocab):
        places = torch.from_numpy(rows).to(device)
        chosen = probabilities.index_select(0, places)
        values, tokens = chosen.topk(width, dim=-1)
        most = np.where(top_k[rows] > 0, top_k[rows], vocab)
        values.masked_fill_(torch.arange(width, device=device) >= torch.from_numpy(most).to(device)[:, None], 0.0)
        cumulative = values.cumsum(dim=-1)
        # Without top-k the share is of all tokens, whether or not they are among the candidates.
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
    """Log-probabilities of `tokens`, int64 [rows], by `logits`, float32 [rows, vocab]: float32 [rows]; then the `most`
    likeliest, or all there are, in falling order: their ids, int64, and log-probabilities, float32, both [rows, most].
    What is no number or below `LEAST_LOGPROB` is that. Which of several at the very edge are told is unspecified."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]) - total
    values, ids = logits.topk(min(most, logits.shape[-1]), dim=-1)
    return _told(chosen).squeeze(1), ids, _told(values - total)


def _told(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=LEAST_LOGPROB).clamp(LEAST_LOGPROB, 0.0)
