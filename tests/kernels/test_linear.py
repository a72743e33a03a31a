"""The product with a weight matrix is the same in either order of computation."""

import pytest
import torch

from tenuto.kernels.linear import Stack, linear


@pytest.mark.parametrize("rows", [0, 1, 2, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_the_same_for_any_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, 40), (24, 40), (24,)))
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (0.02, 0.05)
    for added in (None, bias):
        expected = x.double() @ weight.double().t() + (0 if added is None else added.double())
        ours = linear(x, weight, added)
        assert ours.is_contiguous()
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), expected, rtol=rtol, atol=atol)


def test_a_stack_of_matrices_multiplies_like_one_matrix() -> None:
    x, weight, bias = torch.randn(3, 40), torch.randn(24, 40), torch.randn(24)
    stack = Stack(torch.split(weight, [7, 1, 16]))
    for added in (None, bias):
        torch.testing.assert_close(linear(x, stack, added), linear(x, weight, added))
