"""Steps of recurrent layers on a CUDA device: a few tokens per row, computed one after another, and states that are
read from one slot and written to another, or to the same.

Slots (`kernels.recurrent.Slots`) say which rows there are. A row whose slot to write is negative is padding: it writes
nothing, and the output of its token is zero. Written slots differ from each other and from the slots that other rows
read. States have any floating-point type and are computed in float32.

Rows may absorb inputs that an earlier step kept, before their own tokens, and keep those of their tokens; `base.plan`
has the rules (`StateMoves`). `convolve_step` reads what is absorbed and keeps what is to be kept. Results of absorbed
inputs are behind those of the step's tokens, `most` places for each row: `most` is the number of inputs that a row can
keep. The other functions take their arguments in that form, [tokens + rows * most, ...]; without kept inputs, `most` is
zero.
"""

from __future__ import annotations

import torch
from triton import cdiv, next_power_of_2

from tenuto.kernels.gpu import recurrent_kernels as kernels
from tenuto.kernels.recurrent import Slots

_CHANNELS = 256
"""The number of columns of a convolution that a program computes."""
_STATE = 4096
"""A program computes about as many elements of a recurrent state. Small, so that one row already keeps a GPU busy."""


def convolve_step(
    inputs: torch.Tensor,
    others: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: Slots,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a causal convolution of each channel, then SiLU. `inputs` is [tokens, channels], and `others`, the other
    inputs of the recurrence, [tokens, n], of the same type, both with contiguous tokens. `weight` is [channels, 1,
    kernel], `bias` [channels], and the states are [slots, channels, kernel - 1], contiguous. Returns the outputs and
    `others`, both with those of absorbed inputs, in their element type."""
    tokens, channels = inputs.shape
    rows, kept = len(slots.reads), slots.kept
    most, width = (kept.shape[1], kept.shape[2]) if kept is not None else (0, channels)
    assert kept is None or width == channels + others.shape[1], "all inputs are kept"
    found = torch.empty((tokens + rows * most, width), device=inputs.device, dtype=inputs.dtype)
    kernels.convolve[(rows, cdiv(width, _CHANNELS))](
        inputs,
        others if width > channels else inputs,
        weight,
        bias,
        slots.convolution,
        slots.reads,
        slots.writes,
        slots.spans,
        kept,
        found,
        tokens,
        inputs.stride(0),
        others.stride(0),
        channels,
        width,
        most,
        KERNEL=weight.shape[-1],
        PLACES=next_power_of_2(weight.shape[-1] - 1),
        BLOCK=_CHANNELS,
    )
    return (found, others) if kept is None else (found[:, :channels], found[:, channels:])


def gated_delta_step(
    convolved: torch.Tensor,
    strengths: torch.Tensor,
    log_rates: torch.Tensor,
    decay_bias: torch.Tensor,
    slots: Slots,
    key_heads: int,
) -> torch.Tensor:
    """Computes the gated delta rule, see `kernels.gated_delta.scan` and `models.gated_delta`.

    `convolved` is [tokens, channels]: queries and keys of `key_heads` heads, not normalised yet, then values.
    `strengths` is [tokens, key_heads, 2, value_heads / key_heads] with contiguous tokens: write strengths before the
    sigmoid, and decays before the softplus. `log_rates` and `decay_bias` are float32 [value_heads], and the states are
    [slots, value_heads, key_dim, value_dim], contiguous. Returns float32 [tokens, value_heads, value_dim].
    """
    heads, key_dim, value_dim = slots.recurrent.shape[1:]
    keys = next_power_of_2(key_dim)
    block = min(max(_STATE // keys, 1), next_power_of_2(value_dim))
    rows, most, tokens, found = _outputs(convolved, slots, heads, value_dim)
    kernels.gated_delta[(rows, heads, cdiv(value_dim, block))](
        convolved,
        strengths,
        log_rates,
        decay_bias,
        slots.recurrent,
        slots.reads,
        slots.writes,
        slots.spans,
        found,
        tokens,
        convolved.stride(0),
        strengths.stride(0),
        key_heads,
        most,
        SERVED=heads // key_heads,
        KEY_DIM=key_dim,
        KEYS=keys,
        VALUE_DIM=value_dim,
        BLOCK=block,
    )
    return found


def mamba2_step(
    convolved: torch.Tensor,
    steps: torch.Tensor,
    step_bias: torch.Tensor,
    log_rates: torch.Tensor,
    skip: torch.Tensor,
    slots: Slots,
    step_scale: float = 1.0,
    step_limits: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """Computes Mamba-2, see `kernels.mamba2.scan` and `models.mamba2`.

    `convolved` is [tokens, channels]: inputs, B and C. `steps` is [tokens, heads]; times `step_scale`, plus
    `step_bias`, after softplus, and limited to `step_limits` they are the time steps. `step_bias`, `log_rates` and
    `skip` are float32 [heads]. The states are [slots, heads, head_dim, size], contiguous. Tokens are contiguous.
    Returns float32 [tokens, heads, head_dim].
    """
    heads, head_dim, size = slots.recurrent.shape[1:]
    sizes = next_power_of_2(size)
    block = min(max(_STATE // sizes, 1), next_power_of_2(head_dim))
    rows, most, tokens, found = _outputs(convolved, slots, heads, head_dim)
    kernels.mamba2[(rows, heads, cdiv(head_dim, block))](
        convolved,
        steps,
        step_bias,
        log_rates,
        skip,
        slots.recurrent,
        slots.reads,
        slots.writes,
        slots.spans,
        found,
        tokens,
        convolved.stride(0),
        steps.stride(0),
        step_scale,
        *step_limits,
        (convolved.shape[1] - heads * head_dim) // (2 * size),
        most,
        HEAD_DIM=head_dim,
        BLOCK=block,
        SIZE=size,
        SIZES=sizes,
    )
    return found


def mamba_step(
    x: torch.Tensor,
    steps: torch.Tensor,
    step_bias: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    log_rates: torch.Tensor,
    skip: torch.Tensor,
    slots: Slots,
) -> torch.Tensor:
    """Computes Mamba, see `kernels.mamba.scan` and `models.mamba`.

    `x`, the output of the convolution, and `steps`, before their bias and softplus, are [tokens, channels], and `b` and
    `c` [tokens, size]. Tokens are contiguous. `step_bias` and `skip` are float32 [channels], `log_rates` is float32
    [channels, size], and the states are [slots, channels, size], contiguous. Returns float32 [tokens, channels].
    """
    channels, size = slots.recurrent.shape[1:]
    sizes = next_power_of_2(size)
    block = max(_STATE // sizes // 4, 1)
    rows, most, tokens, found = _outputs(x, slots, channels)
    kernels.mamba[(rows, cdiv(channels, block))](
        x,
        steps,
        step_bias,
        b,
        c,
        log_rates,
        skip,
        slots.recurrent,
        slots.reads,
        slots.writes,
        slots.spans,
        found,
        tokens,
        x.stride(0),
        steps.stride(0),
        b.stride(0),
        c.stride(0),
        channels,
        most,
        BLOCK=block,
        SIZE=size,
        SIZES=sizes,
    )
    return found


def _outputs(convolved: torch.Tensor, slots: Slots, *shape: int) -> tuple[int, int, int, torch.Tensor]:
    """Returns the numbers of rows, of inputs that a row can keep, and of the step's tokens, and room for their outputs,
    float32 [tokens, *shape], which is zero where no row may have a token."""
    rows, most = len(slots.reads), slots.kept.shape[1] if slots.kept is not None else 0
    tokens = len(convolved) - rows * most
    make = torch.empty if slots.spans is None else torch.zeros
    return rows, most, tokens, make((tokens, *shape), device=convolved.device)
