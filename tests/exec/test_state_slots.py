"""State slots: the states that a step reads stay unchanged, whether the step finishes or not."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tenuto.base.config import cache_dir
from tenuto.base.errors import ConfigError, StepFailed
from tenuto.base.plan import NO_SLOT, CopyFailed, PageCopies, Plan, StateMoves, TableChanges
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.torch_forward import TorchForward
from tenuto.models.decoder import Decoder
from tenuto.models.hf import HfCheckpoint
from tenuto.models.store import resolve
from tests.exec.driver import columns, ints, logits_of
from tests.exec.kernels import KERNELS
from tests.models.tiny_hybrids import tiny_bamba


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bamba")
    tiny_bamba().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def decoder(directory: Path) -> Decoder:
    checkpoint = HfCheckpoint(directory)
    return Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)


@pytest.fixture(params=KERNELS)
def executor(request: pytest.FixtureRequest, decoder: Decoder, directory: Path) -> Iterator[ModelExecutor]:
    """Two rows with pages 0 and 1, and 6 state slots, the first of which holds the state after 5 tokens of row 0."""
    if request.param == "torch":
        executor = ModelExecutor(TorchForward(decoder, page_size=16))
    else:
        executor = load_executor(
            resolve(str(directory), directory), ExecutorOptions(16, kernels=request.param, cache=cache_dir())
        )
    executor.prepare((6, 2), 2, lookahead=2)
    told = TableChanges(*columns([(0, 0, 0), (1, 0, 1)]))
    executor.submit(plan({0: [7, 8, 9, 10, 11]}, 0, [NO_SLOT], [0], told))
    executor.collect()
    yield executor
    executor.close()


def plan(
    work: dict[int, list[int]],
    start: int,
    reads: list[int],
    writes: list[int],
    told: TableChanges | None = None,
    absorbs: list[int] | None = None,
    keeps: list[int] | None = None,
) -> Plan:
    nothing = [0] * len(work)
    return Plan(
        step=0,
        rows=ints(list(work)),
        starts=ints([start] * len(work)),
        counts=ints([len(tokens) for tokens in work.values()]),
        tokens=ints([token for tokens in work.values() for token in tokens]),
        samples=ints(
            [len(tokens) if keep else 1 for tokens, keep in zip(work.values(), keeps or nothing, strict=True)]
        ),
        tables=(told or TableChanges(*columns([])),),
        copies=(PageCopies(*columns([])),),
        states=(StateMoves(*map(ints, (reads, writes, absorbs or nothing, keeps or nothing))),),
        sampling=(),
    )


def states(executor: ModelExecutor) -> list[torch.Tensor]:
    """Returns copies of both parts of all slots of all recurrent layers, [layers, slots, ...]."""
    forward = executor.forward
    if isinstance(forward, NativeForward):
        return [torch.from_numpy(forward.memory(0).copy())[None]]
    assert isinstance(forward, TorchForward)
    return [part.clone() for slots in forward.memories.states.values() for part in slots.parts]


def changed(before: list[torch.Tensor], after: list[torch.Tensor]) -> set[int]:
    """Returns the slots in which anything differs."""
    return {slot for old, new in zip(before, after, strict=True) for slot in range(6) if (old != new)[:, slot].any()}


def test_rows_that_start_from_one_state_write_their_own_and_leave_it_unchanged(executor: ModelExecutor) -> None:
    before = states(executor)
    executor.submit(plan({0: [4, 5, 6], 1: [4]}, 5, [0, 0], [3, 2]))
    executor.collect()
    assert changed(before, states(executor)) == {2, 3}


@pytest.mark.parametrize("executor", ["torch"], indirect=True)
def test_a_step_that_fails_halfway_leaves_the_states_it_read_unchanged(
    executor: ModelExecutor, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("told to fail")

    step = plan({0: [4, 5, 6]}, 5, [0], [3])
    before = states(executor)
    with monkeypatch.context() as patched:
        patched.setattr(decoder, "_layers", [*decoder._layers[:-1], fail])
        executor.submit(step)
        with pytest.raises(StepFailed, match="told to fail"):
            executor.collect()
    assert changed(before, states(executor)) == {3}
    executor.submit(step)
    again = executor.collect().tokens.tolist()
    executor.submit(plan({0: [4, 5, 6]}, 5, [0], [4]))
    assert executor.collect().tokens.tolist() == again
    slots = states(executor)
    assert all(torch.equal(part[:, 3], part[:, 4]) for part in slots)


def test_units_copied_out_and_back_in_elsewhere_are_unchanged(executor: ModelExecutor) -> None:
    slot, page = executor.read_units(0, ints([0])), executor.read_units(1, ints([0]))
    assert [part.shape for part in (slot, page)] == [(1, executor.unit_bytes(group)) for group in (0, 1)]
    executor.write_units(0, ints([4]), list(slot))
    executor.write_units(1, ints([1]), list(page))
    more = plan({0: [4, 5], 1: [4, 5]}, 5, [0, 4], [3, 2])
    logits = logits_of(executor, more)
    assert torch.allclose(logits[0], logits[1], rtol=1e-5, atol=1e-6)
    kept = states(executor)
    executor.write_units(0, ints([5, 1]), list(executor.read_units(0, ints([0, 2]))))
    assert changed(kept, states(executor)) == {5, 1}
    one, other = (executor.read_units(0, ints([slot]))[0] for slot in (2, 0))
    assert [row.tolist() for row in executor.read_units(0, ints([2, 0]))] == [one.tolist(), other.tolist()]


def test_a_failed_copy_is_a_typed_error(executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(executor.forward, "read_units", fail)
    with pytest.raises(CopyFailed, match="out of memory"):
        executor.read_units(0, ints([0]))


def test_a_row_continues_from_the_slot_it_reads_wherever_it_writes(executor: ModelExecutor) -> None:
    elsewhere = logits_of(executor, plan({0: [4, 5]}, 5, [0], [3])).clone()
    in_place = logits_of(executor, plan({0: [4, 5]}, 5, [0], [0]))
    assert torch.allclose(elsewhere, in_place, rtol=1e-5, atol=1e-6)


def test_a_state_may_be_written_where_it_was_read(executor: ModelExecutor) -> None:
    executor.submit(plan({0: [4, 5]}, 5, [0], [5]))
    executor.submit(plan({0: [4, 5]}, 5, [0], [0]))
    assert executor.collect().tokens.tolist() == executor.collect().tokens.tolist()
    assert all(torch.equal(part[:, 0], part[:, 5]) for part in states(executor))


@pytest.mark.parametrize("elsewhere", [True, False], ids=["elsewhere", "in place"])
def test_states_and_logits_after_guesses_are_those_of_single_steps(executor: ModelExecutor, elsewhere: bool) -> None:
    """Bit for bit in native kernels. A step with guesses writes the state before it; the next absorbs what was
    accepted, here beside another row, which comes first."""
    singles = [logits_of(executor, plan({0: [token]}, 5 + i, [min(i, 1)], [1])) for i, token in enumerate([4, 5, 6, 7])]
    before = states(executor)
    same = torch.equal if isinstance(executor.forward, NativeForward) else partial(torch.allclose, rtol=1e-4, atol=1e-4)
    slot, other = (2, 3) if elsewhere else (0, 0)
    found = [logits_of(executor, plan({1: [6, 6, 6], 0: [4, 5, 9]}, 5, [NO_SLOT, 0], [5, slot], keeps=[1, 1]))[3:5]]
    assert all(torch.equal(now[:, slot], part[:, 0]) for now, part in zip(states(executor), before, strict=True))
    again = plan({1: [6, 6], 0: [6, 8]}, 7, [5, slot], [5, other], absorbs=[1, 2], keeps=[1, 1])
    found.append(logits_of(executor, again)[2:3])
    found.append(logits_of(executor, plan({1: [4], 0: [7]}, 8, [5, other], [5, 4], absorbs=[0, 1]))[1:])
    assert same(torch.cat(found), torch.cat(singles))
    assert all(same(part[:, 4], part[:, 1]) for part in states(executor))


def test_more_state_slots_than_the_device_can_hold_are_a_typed_error(executor: ModelExecutor) -> None:
    with pytest.raises(ConfigError, match=r"cannot hold 1000000000000 state slots \(\d+ bytes\), 2 pages"):
        executor.prepare((10**12, 2), 1)
