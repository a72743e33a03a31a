"""The kernels that a model's layers use on a CUDA device in place of several of PyTorch's."""

from tenuto.kernels.fused import Fused
from tenuto.kernels.gpu.activations import gated
from tenuto.kernels.gpu.experts import mix_experts
from tenuto.kernels.gpu.norms import add_rms_norm, gated_norm, rms_norm
from tenuto.kernels.gpu.recurrent import convolve_step, gated_delta_step, mamba2_step, mamba_step

FUSED = Fused(
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    gated_norm=gated_norm,
    activate=gated,
    mix_experts=mix_experts,
    convolve_step=convolve_step,
    gated_delta_step=gated_delta_step,
    mamba2_step=mamba2_step,
    mamba_step=mamba_step,
)
