"""The variants of the native kernels that can run here."""

import pytest

from tenuto.kernels.native.build import VARIANTS, Machine

HERE = Machine.this()
any_variant = bool(HERE.compiler and HERE.variants())
needs_variant = pytest.mark.skipif(not any_variant, reason="there are no native kernels here")
every_variant = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(
            name, marks=[] if HERE.compiler and name in HERE.variants() else pytest.mark.skip(f"{name} cannot run here")
        )
        for name in VARIANTS
    ],
)
