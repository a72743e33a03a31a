"""Experts on a GPU give the sum that a loop over all of them gives, and a token's result is its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tenuto.kernels.gpu.experts import mix_experts
from tenuto.kernels.linear import Matrix
from tenuto.kernels.quantized import Numbers
from tenuto.models.block import UNGATED, activate
from tests.kernels.gpu.conftest import DEVICE, TYPES, bound_of
from tests.kernels.gpu.matrices import quantized


class Mixture:
    """Random experts, and the tokens that choose them."""

    def __init__(
        self,
        tokens: int,
        experts: tuple[int, int],
        hidden: int,
        width: int,
        activation: str = "silu",
        dtype: torch.dtype = torch.float32,
        *,
        biased: bool = False,
        numbers: Numbers | None = None,
    ) -> None:
        """`experts`: their number, and how many a token chooses. `numbers`: those of quantized weights."""
        count, chosen = experts
        generator = torch.Generator().manual_seed(tokens + hidden)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.activation = activation
        small = 1.0 if numbers is None else 2.0 ** -(4 + numbers.bits)  # quantized weights are larger
        self.x = random(tokens, hidden + 3)[:, :hidden] * small
        preferred = torch.arange(count, 0, -1.0) ** 2  # some experts are chosen often, others hardly ever
        self.chosen = torch.multinomial(preferred.expand(max(tokens, 1), count), chosen, generator=generator)[:tokens]
        self.weights = random(tokens, chosen).abs()
        inner = width if activation in UNGATED else 2 * width
        self.count = count

        def matrix(outputs: int, inputs: int) -> tuple[Matrix, torch.Tensor]:
            """Returns the matrix of all experts, on the device, and each one's weights."""
            if numbers is None:
                plain = random(count * outputs, inputs) * inputs**-0.5
                return plain.to(DEVICE), plain.view(count, outputs, inputs).double()
            group = 16 if numbers is Numbers.INT8 else 32
            made, plain = quantized(numbers, count * outputs, inputs, group, minima=biased)
            return made, plain.view(count, outputs, inputs)

        (self.inner, self._inner), (self.down, self._down) = matrix(inner, hidden), matrix(hidden, width)
        self.biases = (random(count, inner), random(count, hidden)) if biased else None

    def mixed(self, tokens: slice = slice(None)) -> torch.Tensor:
        """Returns what the kernels compute for some tokens."""
        x, chosen, weights = (each[tokens].to(DEVICE) for each in (self.x, self.chosen, self.weights))
        biases = (self.biases[0].to(DEVICE), self.biases[1].to(DEVICE)) if self.biases is not None else None
        return mix_experts(x, chosen, weights, self.inner, self.down, self.count, biases, self.activation).cpu()

    def expected(self) -> torch.Tensor:
        """Returns what the experts compute one after another, float64."""
        found = torch.zeros(self.x.shape, dtype=torch.float64)
        for token, (chosen, weights) in enumerate(zip(self.chosen.tolist(), self.weights.tolist(), strict=True)):
            for expert, weight in zip(chosen, weights, strict=True):
                first, second = (each[expert].double() for each in self.biases) if self.biases else (None, None)
                x = functional.linear(self.x[token : token + 1].double(), self._inner[expert], first)
                x = functional.linear(activate(self.activation, x), self._down[expert], second)
                found[token] += weight * x[0]
        return found


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.sampled_from([1, 2, 17, 40]),
    experts=st.sampled_from([(1, 1), (3, 2), (8, 3), (20, 4)]),
    sizes=st.sampled_from([(7, 5), (64, 32), (40, 130)]),
    activation=st.sampled_from(["silu", "clamped", "relu2"]),
    biased=st.booleans(),
)
def test_experts_are_mixed(tokens, experts, sizes, activation, biased) -> None:
    hidden, width = sizes
    made = Mixture(tokens, experts, hidden, width, activation, biased=biased)
    torch.testing.assert_close(made.mixed().double(), made.expected(), rtol=2e-5, atol=2e-5)


@settings(max_examples=8, deadline=None)
@given(
    numbers=st.sampled_from(Numbers),
    tokens=st.sampled_from([1, 17, 40]),
    experts=st.sampled_from([(1, 1), (3, 2), (20, 4)]),
    sizes=st.sampled_from([(64, 32), (96, 288), (256, 64)]),
    activation=st.sampled_from(["clamped", "relu2"]),
    biased=st.booleans(),
)
def test_experts_with_quantized_weights_are_mixed(numbers, tokens, experts, sizes, activation, biased) -> None:
    hidden, width = sizes
    made = Mixture(tokens, experts, hidden, width, activation, biased=biased, numbers=numbers)
    expected = made.expected()
    apart = (made.mixed().double() - expected).abs().max() / expected.abs().max()
    assert apart < 2e-4


@pytest.mark.parametrize("dtype", [each for each in TYPES if each != torch.float16])  # results are below its range
@pytest.mark.parametrize("numbers", Numbers)
def test_many_tokens_of_experts_with_quantized_weights_fill_tiles(numbers: Numbers, dtype: torch.dtype) -> None:
    made = Mixture(130, (3, 2), 96, 64, dtype=dtype, numbers=numbers)
    expected = made.expected()
    assert (made.mixed().double() - expected).abs().max() < bound_of(dtype, 2e-3, 2e-4) * expected.abs().max()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "tile"), [(130, 64), (60, 16)])
def test_many_tokens_fill_tiles_of_several_experts(tokens: int, tile: int, dtype: torch.dtype) -> None:
    made = Mixture(tokens, (3, 2), 36, 20, dtype=dtype)
    assert (tokens * 2 >= 64 * 3) == (tile == 64)
    torch.testing.assert_close(
        made.mixed().double(), made.expected(), rtol=bound_of(dtype, 2e-3, 2e-5), atol=bound_of(dtype, 5e-3, 2e-5)
    )


def test_no_tokens_have_no_result() -> None:
    assert Mixture(0, (3, 2), 16, 16).mixed().shape == (0, 16)


def test_a_token_s_result_does_not_depend_on_the_others() -> None:
    made = Mixture(19, (4, 2), 32, 16)
    together = made.mixed()
    for some in (slice(0, 1), slice(3, 9)):
        torch.testing.assert_close(made.mixed(some), together[some], rtol=1e-6, atol=1e-6)
    made.x[3] = torch.nan
    others = [i for i in range(19) if i != 3]
    assert torch.equal(made.mixed()[others], together[others])
