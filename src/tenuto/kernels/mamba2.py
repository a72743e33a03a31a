"""The recurrence of Mamba-2 in plain PyTorch: the state space dual form of Dao and Gu, arXiv:2405.21060, section 6."""

from __future__ import annotations

import torch

from tenuto.kernels.recurrent import SCAN_BLOCK


def scan(
    x: torch.Tensor, steps: torch.Tensor, rates: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the recurrence over each row's tokens: the state `h` of each head becomes `exp(step * rate) * h + step *
    x b^T`, and the head's output is `h c`.

    All arrays are float32. `x` is [rows, length, heads, head_dim]. `steps`, at least 0, are [rows, length, heads], and
    `rates`, at most 0, are [heads]. `b` and `c` are [rows, length, groups, size], each for `heads / groups` consecutive
    heads. `state` is [rows, heads, head_dim, size]. Returns the outputs, of the shape of `x`, and the state after the
    last token.
    """
    found = []
    for first in range(0, x.shape[1], SCAN_BLOCK):
        block = slice(first, first + SCAN_BLOCK)
        given, state = _block(x[:, block], steps[:, block], rates, b[:, block], c[:, block], state)
        found.append(given)
    return torch.cat(found, dim=1), state


def _block(
    x: torch.Tensor, steps: torch.Tensor, rates: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what `scan` does, for all tokens at once. Heads are split into (groups, heads of a group). Letters in
    `einsum`: r rows, t and s tokens, g groups, k heads of a group, p elements of a head, n elements of the state."""
    rows, length, _, head_dim = x.shape
    groups = b.shape[2]
    # Decay since the start of the block, in float64: the difference of two may be much smaller than either.
    decay = (steps.double() * rates).cumsum(dim=1).view(rows, length, groups, -1)
    entering = (x * steps[..., None]).view(rows, length, groups, -1, head_dim)
    before = state.view(rows, groups, -1, head_dim, b.shape[3])

    since = (decay[:, :, None] - decay[:, None]).permute(0, 3, 4, 1, 2)  # r g k t s
    later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    weights = since.masked_fill(later, -torch.inf).exp().float() * torch.einsum("rtgn,rsgn->rgts", c, b)[:, :, None]
    given = torch.einsum("rgkts,rsgkp->rtgkp", weights, entering)
    given += torch.einsum("rtgn,rgkpn->rtgkp", c, before) * decay.exp().float()[..., None]

    left = (decay[:, -1:] - decay).exp().float()[..., None]
    after = before * decay[:, -1].exp().float()[..., None, None]
    after = after + torch.einsum("rsgkp,rsgn->rgkpn", entering * left, b)
    return given.reshape(x.shape), after.reshape(state.shape)
