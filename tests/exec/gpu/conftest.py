"""As for the kernels' tests."""

from tests.kernels.gpu.conftest import DEVICE

__all__ = ["DEVICE"]
