"""Kernels for GPUs run in Triton's interpreter where there is no GPU, which is chosen before they are imported."""

import os

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
