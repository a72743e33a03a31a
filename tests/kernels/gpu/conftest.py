"""The kernels for GPUs run in Triton's interpreter here, which is chosen before they are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
