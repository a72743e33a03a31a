"""The gated delta rule in plain PyTorch: Yang et al., arXiv:2412.06464, in the chunked form of section 3.3."""

from __future__ import annotations

import torch

from tenuto.kernels.recurrent import SCAN_BLOCK


def scan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the recurrence over each row's tokens: the state `S` of each head becomes `T + beta * k (v - T^T k)^T`
    with `T = exp(decay) * S`, and the head's output is `S^T q`.

    All arrays are float32. `q` and `k` are [rows, length, heads, key_dim], and `v` is [rows, length, heads, value_dim].
    `decay`, at most 0, and `beta` are [rows, length, heads]. `state` is [rows, heads, key_dim, value_dim]. Returns the
    outputs, of the shape of `v`, and the state after the last token.
    """
    q, k, v, decay, beta = (x.transpose(1, 2) for x in (q, k, v, decay, beta))
    found = []
    for first in range(0, q.shape[2], SCAN_BLOCK):
        at = slice(first, first + SCAN_BLOCK)
        given, state = _block(q[:, :, at], k[:, :, at], v[:, :, at], decay[:, :, at], beta[:, :, at], state)
        found.append(given)
    return torch.cat(found, dim=2).transpose(1, 2), state


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what `scan` does, for all tokens at once; arrays are [rows, heads, length, ...].

    The write of a token, `w = beta * (v - T^T k)`, depends on the writes of earlier tokens in the block. This is a
    triangular system, which is solved for all tokens.
    """
    length = q.shape[2]
    # float64, because differences of two sums may be much smaller than either.
    total = decay.double().cumsum(dim=2)
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    since = (total[..., None] - total[..., None, :]).masked_fill(later, -torch.inf).exp().float()
    faded, left = total.exp().float()[..., None], (total[..., -1:] - total).exp().float()[..., None]

    among = (beta[..., None] * since * (k @ k.mT)).tril(-1)
    wanted = beta[..., None] * (v - faded * (k @ state))
    written = torch.linalg.solve_triangular(among, wanted, upper=False, unitriangular=True)
    given = faded * (q @ state) + (since * (q @ k.mT)) @ written
    return given, state * faded[:, :, -1:] + (k * left).mT @ written
