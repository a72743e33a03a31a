"""Calls of the field's libraries: selected where they are installed, and made as documented. There is no GPU here, so
the reference stands in for them, with their names, arguments and layouts."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from tenuto.kernels import gated_delta, mamba2
from tenuto.kernels.recurrent import SCAN_BLOCK
from tenuto.kernels.scans import gated_delta_by, gated_delta_scan, mamba2_by, mamba2_scan
from tests.kernels.test_recurrent import HEADS, LENGTH, ROWS, SIZE, delta_inputs, mamba2_inputs

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Mamba:
    """`mamba_ssm`'s functions, as documented, for rows of equal length."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def mamba_chunk_scan_combined(
        self,
        x,
        dt,
        A,  # noqa: N803 - their names
        B,  # noqa: N803
        C,  # noqa: N803
        chunk_size,
        *,
        initial_states=None,
        return_final_states=False,
    ) -> Any:
        self.called.append("combined")
        assert chunk_size & (chunk_size - 1) == 0
        assert return_final_states
        return mamba2.scan(x, dt, A, B, C, initial_states)

    def selective_state_update(self, state, x, dt, A, B, C) -> torch.Tensor:  # noqa: N803
        """Takes `x` and `dt` [rows, heads, head_dim], `A` [heads, head_dim, size], `B` and `C` [rows, groups, size];
        changes the state in place. With heads, all elements of one share its step and rate, with stride 0."""
        self.called.append("update")
        assert dt.shape == x.shape
        assert (dt.stride(-1), A.stride(-1), A.stride(-2)) == (0, 0, 0)
        assert A.shape == state.shape[1:]
        assert state.is_contiguous()
        given, after = mamba2.scan(x[:, None], dt[:, None, :, 0], A[:, 0, 0], B[:, None], C[:, None], state)
        state.copy_(after)
        return given[:, 0]


class Delta:
    """`fla`'s functions, as documented. Without `scale` they would use their own."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def chunk_gated_delta_rule(self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False) -> Any:
        self.called.append("chunk")
        assert q.dtype == k.dtype == v.dtype != torch.float32
        return self._compute(q, k, v, g, beta, scale, initial_state, output_final_state)

    def fused_recurrent_gated_delta_rule(
        self, q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False
    ) -> Any:
        self.called.append("recurrent")
        assert (gk, gv) == (None, None)
        return self._compute(q, k, v, g, beta, scale, initial_state, output_final_state)

    @staticmethod
    def _compute(q, k, v, g, beta, scale, initial_state, output_final_state) -> Any:
        assert (scale, output_final_state) == (1.0, True)
        assert (g.dtype, beta.dtype, initial_state.dtype) == (torch.float32,) * 3
        given, after = gated_delta.scan(q.float(), k.float(), v.float(), g, beta, initial_state)
        return given.to(q.dtype), after


@pytest.mark.parametrize(("length", "called"), [(1, "update"), (2, "combined"), (LENGTH, "combined")])
def test_mamba_is_called_as_documented_and_gives_the_results_of_the_reference(length: int, called: str) -> None:
    library, rates = Mamba(), -torch.arange(1.0, HEADS + 1)
    scan = mamba2_by(library.mamba_chunk_scan_combined, library.selective_state_update)
    _, (x, steps, b, c), state = mamba2_inputs(1)
    x, steps, b, c = (part[:, :length] for part in (x, steps, b, c))
    kept = state.clone()
    given, after = scan(x, steps, rates, b, c, state)
    expected = mamba2.scan(x, steps, rates, b, c, state)
    assert library.called == [called]
    assert torch.equal(given, expected[0])
    assert torch.equal(after, expected[1])
    assert torch.equal(state, kept)  # the slot that a step reads stays unchanged


@pytest.mark.parametrize(
    ("length", "dtype", "called"),
    [
        (1, torch.bfloat16, "recurrent"),
        (SCAN_BLOCK, torch.bfloat16, "recurrent"),
        (LENGTH, torch.bfloat16, "chunk"),
        (LENGTH, torch.float32, "recurrent"),
    ],
)
def test_fla_is_called_as_documented_and_gives_the_results_of_the_reference(
    length: int, dtype: torch.dtype, called: str
) -> None:
    library = Delta()
    scan = gated_delta_by(library.chunk_gated_delta_rule, library.fused_recurrent_gated_delta_rule, dtype)
    _, parts, state = delta_inputs(1)
    q, k, v, decay, beta = (part[:, :length] for part in parts)
    kept = state.clone()
    given, after = scan(q, k, v, decay, beta, state)
    expected = gated_delta.scan(q, k, v, decay, beta, state)
    assert library.called == [called]
    assert given.dtype == after.dtype == torch.float32
    near = 0.05 if called == "chunk" else 0.0  # the rounding of inputs and results to bfloat16
    assert torch.allclose(given, expected[0], rtol=near, atol=near)
    assert torch.allclose(after, expected[1], rtol=near, atol=near)
    assert torch.equal(state, kept)
    assert given.shape[:3] == (ROWS, length, HEADS)
    assert after.shape[2] == SIZE


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> tuple[Mamba, Delta]:
    """Pretends that both libraries are installed, as far as they are imported."""
    mamba, delta = Mamba(), Delta()
    modules: dict[str, dict[str, Any]] = {
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": mamba.selective_state_update},
        "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": mamba.mamba_chunk_scan_combined},
        "fla.ops.gated_delta_rule": {
            "chunk_gated_delta_rule": delta.chunk_gated_delta_rule,
            "fused_recurrent_gated_delta_rule": delta.fused_recurrent_gated_delta_rule,
        },
    }
    for name, functions in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    return mamba, delta


def test_installed_libraries_are_used_on_cuda(installed: tuple[Mamba, Delta]) -> None:
    mamba, delta = installed
    _, (x, steps, b, c), state = mamba2_inputs(1)
    mamba2_scan(CUDA)(x, steps, -torch.ones(HEADS), b, c, state)
    _, (q, k, v, decay, beta), state = delta_inputs(1)
    gated_delta_scan(CUDA, torch.bfloat16)(q, k, v, decay, beta, state)
    assert (mamba.called, delta.called) == (["combined"], ["chunk"])


@pytest.mark.usefixtures("installed")
def test_plain_pytorch_runs_on_a_cpu() -> None:
    assert mamba2_scan(CPU) is mamba2.scan
    assert gated_delta_scan(CPU, torch.float32) is gated_delta.scan


def test_plain_pytorch_runs_where_the_libraries_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mamba_ssm", "fla"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    assert mamba2_scan(CUDA) is mamba2.scan
    assert gated_delta_scan(CUDA, torch.bfloat16) is gated_delta.scan
