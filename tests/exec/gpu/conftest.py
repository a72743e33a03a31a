"""As for the kernels' tests."""

from tests.kernels.gpu.conftest import DEVICE, TYPES, bound_of

__all__ = ["DEVICE", "TYPES", "bound_of"]
