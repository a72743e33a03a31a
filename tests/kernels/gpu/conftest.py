"""The device on which kernels for GPUs are tested, and the types: without a GPU they run in Triton's interpreter."""

import inspect
from functools import cache
from types import SimpleNamespace

import torch
from triton.runtime import interpreter

# Triton's interpreter looks through its modules whenever a kernel calls a function. They stay the same.
interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": cache(inspect.getmembers)})

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

TYPES = [torch.float16, torch.float32]
if DEVICE.type == "cuda":
    TYPES.append(torch.bfloat16)  # the interpreter multiplies it wrongly


def bound_of(dtype: torch.dtype, half: float, single: float) -> float:
    """Returns the bound for errors in a type, given those in float16 and in float32; bfloat16 has three bits less than
    float16."""
    return {torch.float16: half, torch.bfloat16: 8 * half, torch.float32: single}[dtype]
