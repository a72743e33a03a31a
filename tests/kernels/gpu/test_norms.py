"""The norms and activations for GPUs compute what the reference computes."""

import pytest
import torch
from torch.nn import functional

from tenuto.kernels.gpu.activations import gated
from tenuto.kernels.gpu.norms import add_rms_norm, gated_norm, rms_norm
from tenuto.models.block import GATES, UNGATED, Norm, Room, activate
from tests.kernels.gpu.conftest import DEVICE, TYPES, bound_of


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    bound = bound_of(found.dtype, 2e-3, 1e-5)
    torch.testing.assert_close(found.cpu(), expected, rtol=bound, atol=bound)


def norm_of(width: int, generator: torch.Generator, groups: int = 1) -> Norm:
    norm = Norm("norm", width, 1e-5, Room(torch.device("cpu"), torch.float32, width), groups)
    norm.weight.uniform_(0.5, 1.5, generator=generator)
    return norm


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("width", "groups"), [(1, 1), (48, 1), (48, 3), (64, 1), (576, 1), (3000, 1), (3000, 8)])
def test_rows_of_any_shape_and_stride_are_normalised(dtype: torch.dtype, width: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(width)
    norm = norm_of(width, generator, groups)
    x = torch.randn(3, 5, width, generator=generator).to(dtype)
    x[1, 1] = 0
    for each in (x, x[:, 1], x[:, 1:], x[1:2].expand(2, 5, width)):
        close(rms_norm(each.to(DEVICE), norm.weight.to(DEVICE), 1e-5, groups), norm(each))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 100, 2048, 5120])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_a_branch_is_added_and_the_sum_is_normalised(dtype: torch.dtype, width: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(width)
    norm = norm_of(width, generator)
    x, branch = (torch.randn(7, width, generator=generator).to(dtype) for _ in range(2))
    total, normed = add_rms_norm(x.to(DEVICE), branch.to(DEVICE), scale, norm.weight.to(DEVICE), 1e-5)
    close(total, (x.float() + scale * branch.float()).to(dtype))
    close(normed, norm(total.cpu()))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "width"), [(1, 7), (6, 24), (3, 700)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("gate_first", [True, False])
def test_norms_of_heads_with_an_output_gate(
    dtype: torch.dtype, heads: int, width: int, shared: bool, gate_first: bool
) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(5, heads, width, generator=generator)
    gate = torch.randn(5, heads, 3 * width, generator=generator).to(dtype)[..., width : 2 * width]
    weight = torch.rand(width if shared else heads * width, generator=generator)
    opened = functional.silu(0.7 * gate.float())
    normed = functional.rms_norm(x * opened if gate_first else x, (width,), None, 1e-5) * weight.view(-1, width)
    found = gated_norm(
        x.flatten(1).to(DEVICE), gate.to(DEVICE), weight.to(DEVICE), 1e-5, heads, gate_first=gate_first, gate_scale=0.7
    )
    close(found, (normed if gate_first else normed * opened).to(dtype).flatten(1))
    close(gated_norm(x.flatten(1).to(DEVICE), gate.to(DEVICE), None, gate_scale=0.7), (x * opened).to(dtype).flatten(1))


def test_nothing_is_normalised() -> None:
    assert rms_norm(torch.empty(0, 5, 64, device=DEVICE), torch.ones(64, device=DEVICE), 1e-5).shape == (0, 5, 64)


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(64, device=DEVICE)
    clean = rms_norm(x.to(DEVICE), weight, 1e-5)
    x[3] = torch.nan
    spoilt = rms_norm(x.to(DEVICE), weight, 1e-5)
    others = [i for i in range(40) if i != 3]
    assert torch.equal(spoilt[others], clean[others])
    assert spoilt[3].isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", [*GATES, *UNGATED])
@pytest.mark.parametrize("width", [5, 1024, 1500])
def test_activations_of_any_width(dtype: torch.dtype, name: str, width: int) -> None:
    x = 6 * torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(width))
    x[0, :3] = torch.tensor([-30.0, 30.0, 0.0])
    for scale in (1.0, 0.5):
        expected = activate(name, x.to(dtype).float(), scale).to(dtype)
        close(gated(name, x.to(dtype).to(DEVICE), scale), expected)
