"""Copies to and from a CUDA device, with a stand-in for `torch.cuda`: no test here has a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tenuto.exec import host_copies, torch_memory
from tenuto.exec.host_copies import CudaCopies, HostCopies, copies_for
from tenuto.exec.torch_memory import Memories
from tenuto.kernels.elements import Element
from tenuto.models.groups import LayerGroup, PageShape

CPU = torch.device("cpu")


class FakeStream:
    """Appends all calls to `log`."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name

    def record_event(self) -> FakeStream:
        return self

    def synchronize(self) -> None:
        self.log.append(f"waits for {self.name}")


class Cuda:
    """A stand-in for `torch.cuda`."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802 - as PyTorch calls it
        assert device == CPU
        return FakeStream(self.log, "its own stream")

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == CPU
        return FakeStream(self.log, "the steps' stream")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        yield
        self.log.append(f"off {stream.name}")


@pytest.fixture
def cuda() -> Cuda:
    return Cuda()


@pytest.fixture
def memories(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Memories:
    """Pages of two layers, copied as on a CUDA device."""

    def allocate(shape: tuple[int, ...]) -> torch.Tensor:
        cuda.log.append(f"pins {shape}")
        return torch.empty(shape, dtype=torch.uint8)

    monkeypatch.setattr(torch_memory, "copies_for", lambda device: CudaCopies(device, cuda, allocate))
    groups = [LayerGroup(PageShape(0, 1, 2, Element("float32")), (0, 1))]
    memories = Memories(groups, (5,), 1, 0, 4, CPU)
    data, _ = memories.pages[0].units
    data.copy_(torch.arange(data.numel()).view_as(data))
    return memories


def units(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def test_units_copied_to_the_host_are_pinned_and_complete_on_return(memories: Memories, cuda: Cuda) -> None:
    data = memories.read_units(0, units(1, 3))
    assert cuda.log == [f"pins {data.shape}", "waits for the steps' stream"]
    assert data.shape == (2, 2 * 2 * 4 * 2 * 4)


def test_units_copied_to_the_device_are_written_beside_steps_and_waited_for(memories: Memories, cuda: Cuda) -> None:
    data = memories.read_units(0, units(1, 3))
    before = memories.pages[0].units[0].clone()
    cuda.log.clear()
    memories.write_units(0, units(0, 2), list(data))
    assert cuda.log == ["on its own stream", "waits for its own stream", "off its own stream"]
    after = memories.pages[0].units[0]
    assert torch.equal(after[:, :, [0, 2]], before[:, :, [1, 3]])
    assert torch.equal(after[:, :, [1, 3, 4]], before[:, :, [1, 3, 4]])


def test_a_copy_that_fails_halfway_has_ended_when_it_raises(memories: Memories, cuda: Cuda) -> None:
    data = list(memories.read_units(0, units(1, 3)))
    cuda.log.clear()
    with pytest.raises(RuntimeError, match="size"):
        memories.write_units(0, units(0, 2), [data[0], data[1][:-1]])
    assert cuda.log[:2] == ["on its own stream", "waits for its own stream"]


def test_only_cuda_has_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(host_copies, "CudaCopies", asked.append)
    assert type(copies_for(CPU)) is HostCopies
    copies_for(torch.device("cuda:1"))
    assert asked == [torch.device("cuda:1")]
