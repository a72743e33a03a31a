"""Settings of Mamba-2 layers whose keys several families share."""

from __future__ import annotations

from tenuto.base.errors import ModelError
from tenuto.models.config import Mamba2
from tenuto.models.settings import Settings


def mamba2(settings: Settings, channels: int | None = None) -> Mamba2:
    """Reads the Mamba-2 layers of a model. Raises `ModelError` if their heads do not have `channels` channels in all,
    by default `mamba_expand` times the hidden size."""
    hidden, heads = settings.get("hidden_size", int), settings.get("mamba_n_heads", int, 128)
    channels = channels or settings.get("mamba_expand", int, 2) * hidden
    head_dim = settings.automatic("mamba_d_head", channels // max(heads, 1))
    if heads * head_dim != channels:
        raise ModelError(
            f"{settings.source} has {heads} Mamba-2 heads of {head_dim}; expected: {channels} channels in all"
        )
    least, most = settings.limits("time_step_limit")
    return Mamba2(
        heads,
        head_dim,
        state=settings.get("mamba_d_state", int, 256),
        groups=settings.get("mamba_n_groups", int, 1),
        kernel=settings.get("mamba_d_conv", int, 4),
        conv_bias=settings.get("mamba_conv_bias", bool, default=True),
        proj_bias=settings.get("mamba_proj_bias", bool, default=False),
        least_step=least,
        most_step=most,
    )
