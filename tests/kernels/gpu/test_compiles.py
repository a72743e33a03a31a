"""Where our kernels for GPUs are used."""

import pytest
import torch

from tenuto.kernels import fused

CUDA = torch.device("cuda")


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)])
def test_they_need_a_gpu_of_compute_capability_8(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fused.compiles(CUDA) == expected
    assert not fused.compiles(torch.device("cpu"))


def test_they_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert not fused.compiles(CUDA)
