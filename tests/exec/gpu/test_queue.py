"""The queue of the tests refuses what a captured graph could not repeat."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.exec.gpu.conftest import DEVICE
from tests.exec.gpu.queue import HostQueue

FIXED, COUNTS = torch.arange(4.0), torch.arange(4)


def test_work_that_a_graph_can_repeat_is_repeated() -> None:
    runs: list[int] = []

    result = torch.zeros(4)

    def work() -> None:
        runs.append(1)
        result.copy_(FIXED * 2 + torch.ones(4))

    again = HostQueue().capture(work)
    before = result.clone()
    FIXED.add_(1)
    again()
    FIXED.sub_(1)
    assert torch.equal(result, before + 2)
    assert len(runs) == 2


@pytest.mark.parametrize(
    "work",
    [
        lambda: FIXED * FIXED.sum().item(),
        lambda: FIXED[FIXED > 1],
        lambda: torch.nonzero(FIXED),
        lambda: FIXED.masked_select(FIXED > 1),
        lambda: FIXED.masked_scatter(FIXED > 1, FIXED * 2),
        lambda: (FIXED * 2).index_put_((FIXED > 1,), FIXED.sum()),
        lambda: (FIXED * 2).__setitem__(FIXED > 1, 0.0),
        lambda: FIXED.repeat_interleave(COUNTS),
        lambda: torch.bincount(COUNTS),
        lambda: torch.where(FIXED > 1),
        lambda: torch.argwhere(FIXED),
        lambda: torch.allclose(FIXED, FIXED),
        lambda: torch.equal(FIXED, FIXED),
        lambda: bool(FIXED.sum()),
        lambda: (FIXED * 2).tolist()[0],
        lambda: (FIXED * 2).numpy()[0],
        lambda: np.asarray(FIXED * 2),
        lambda: (FIXED * 2).cpu()[0],
        lambda: torch.cuda.synchronize(0),
    ],
)
def test_work_that_waits_for_the_device_is_refused(work: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match="waits for the device"):
        HostQueue().capture(work)


@pytest.mark.parametrize(
    "work",
    [
        lambda: FIXED + torch.from_numpy(np.ones(4, np.float32)),
        lambda: FIXED + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda: FIXED + torch.frombuffer(bytearray(16), dtype=torch.float32),
        lambda: FIXED + torch.as_tensor(np.ones(4, np.float32)),
        lambda: (FIXED * 2).copy_(FIXED),
        lambda: (FIXED * 2).to("cpu"),
        lambda: FIXED.to(DEVICE, torch.float64),
        lambda: FIXED.to(device=DEVICE),
    ],
)
def test_work_that_copies_from_the_host_s_memory_is_refused(work: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match="the host's memory"):
        HostQueue().capture(work)


def test_work_that_uses_other_tensors_the_next_time_is_refused() -> None:
    others = [FIXED.clone() for _ in range(2)]
    again = HostQueue().capture(lambda: others.pop() + 1)
    with pytest.raises(AssertionError, match="other tensors"):
        again()


def test_work_that_does_other_operations_the_next_time_is_refused() -> None:
    signs = [True, False]
    again = HostQueue().capture(lambda: FIXED.abs() if signs.pop() else FIXED.neg())
    with pytest.raises(AssertionError, match="other operations"):
        again()


@pytest.mark.parametrize("other", [lambda n: FIXED * float(n), lambda n: torch.ones(n) + 1, lambda n: FIXED[:n] + 1])
def test_work_that_has_other_numbers_or_sizes_the_next_time_is_refused(other: Callable[[int], object]) -> None:
    numbers = [3, 2]
    again = HostQueue().capture(lambda: other(numbers.pop()))
    with pytest.raises(AssertionError, match="other operations"):
        again()


def test_work_that_leaves_behind_what_it_computed_is_refused() -> None:
    left: list[torch.Tensor] = []
    with pytest.raises(AssertionError, match="leaves memory behind"):
        HostQueue().capture(lambda: left.append(FIXED + 1))


def test_work_that_allocates_memory_of_the_host_is_refused() -> None:
    with pytest.raises(AssertionError, match="memory of the host"):
        HostQueue().capture(lambda: torch.ops.aten._pin_memory(FIXED))


@triton.jit
def _add(x, number):
    tl.store(x, tl.load(x) + number)


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded in Triton's interpreter")
def test_a_kernel_that_is_launched_with_other_numbers_tensors_or_programs_is_refused() -> None:
    x, y = (torch.zeros(1, device=DEVICE) for _ in range(2))
    first = (x, 2, 1)
    again = HostQueue().capture(lambda: _add[(1,)](x, 2))
    again()
    assert x.item() == 4
    for second in ((y, 2, 1), (x, 3, 1), (x, 2, 2)):
        given = [second, first]

        def work(given: list[tuple[torch.Tensor, int, int]] = given) -> None:
            tensor, number, programs = given.pop()
            _add[(programs,)](tensor, number)

        again = HostQueue().capture(work)
        with pytest.raises(AssertionError, match="other operations"):
            again()
