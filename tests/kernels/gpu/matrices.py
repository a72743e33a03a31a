"""Random quantized matrices on the device."""

import numpy as np
import torch
from gguf import quants

from tenuto.kernels.native.grouped import E4M3
from tenuto.kernels.quantized import Numbers, Quantized, packed
from tests.kernels.gpu.conftest import DEVICE


def quantized(numbers: Numbers, outputs: int, inputs: int, group: int, minima: bool) -> tuple[Quantized, torch.Tensor]:
    """Returns a random matrix, and its weights, float64."""
    generator = torch.Generator().manual_seed(outputs + inputs + group)
    values = torch.randint(0, 2**numbers.bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    if numbers is Numbers.FP8:
        values &= 0xBF  # values up to 2, no NaN
    groups = -(-inputs // group)
    if numbers is Numbers.FP4:
        scales = torch.randint(125, 130, (groups, outputs), generator=generator, dtype=torch.uint8)
    else:
        scales = (torch.rand(groups, outputs, generator=generator) + 0.5).half()
    integers = numbers in (Numbers.INT4, Numbers.INT8)
    least = torch.randn(groups, outputs, generator=generator) if minima and integers else None
    found = Quantized(
        numbers,
        inputs,
        group,
        packed(values, numbers).to(DEVICE),
        scales.to(DEVICE),
        None if least is None else least.to(DEVICE),
    )
    of_input = torch.arange(inputs) // group
    scale = scales.double()[of_input].T
    if numbers is Numbers.FP4:
        halves = torch.from_numpy(np.array(quants.MXFP4.kvalues, np.float64))
        return found, halves[values.long()] * 2.0 ** (scale - 128)
    if numbers is Numbers.FP8:
        return found, torch.from_numpy(E4M3)[values.long()].double() * scale
    if least is None:
        return found, (values.double() - 2 ** (numbers.bits - 1)) * scale
    return found, values.double() * scale + least.double()[of_input].T
