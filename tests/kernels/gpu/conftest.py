"""The device on which kernels for GPUs are tested: without a GPU they run in Triton's interpreter."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
