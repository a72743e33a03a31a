"""Instructions of emulated kernels are counted, for each kind of operation."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from bench import arm
from bench.arm import PRODUCTS, WIDEST, Counting, Work, counted, counting
from bench.kernels import PAGE
from tenuto.kernels.native.build import Unavailable
from tenuto.models.gguf import GgufCheckpoint
from tenuto.models.native.program import NativeProgram
from tests.exec.driver import Driver, logits_of
from tests.exec.test_native_forward import WIDE, text
from tests.kernels.arm.emulator import needs_emulator
from tests.kernels.arm.twins import emulated, executor
from tests.models.tiny import save_gguf

VARIANT = "neon_dot"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> NativeProgram:
    checkpoint = GgufCheckpoint(save_gguf(tmp_path_factory.mktemp("model") / "m.gguf", WIDE, Kind.Q4_1))
    return NativeProgram(checkpoint.config, checkpoint.weights(), PAGE)


@pytest.fixture(scope="module")
def kernels() -> Iterator[Counting]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(counting(VARIANT))
        except Unavailable as error:
            pytest.skip(str(error))
        yield made


@needs_emulator
def test_twice_the_rows_take_twice_the_instructions_and_no_fewer_than_are_possible(
    kernels: Counting, program: NativeProgram
) -> None:
    works = [Work(rows, 0, 1) for rows in (4, 8)]
    four, eight = counted(kernels, program, works)
    for kind in PRODUCTS:
        assert four[kind] > WIDEST[VARIANT].least(works[0].multiplications(program)[kind])
        assert 1.8 * four[kind] < eight[kind] < 2.2 * four[kind], kind


@needs_emulator
def test_operations_that_are_counted_one_by_one_compute_what_a_whole_step_does(
    kernels: Counting, program: NativeProgram
) -> None:
    """The last layer computes only the token whose logits are wanted."""
    found = []
    for each in (kernels, emulated(VARIANT)):
        made = executor(each, program, 1)
        found.append(logits_of(made, Driver(made, 2, 1).plan([(0, text(5), 1)])).clone())
        made.close()
    assert torch.equal(*found)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm, "EMULATOR", None)
    with pytest.raises(Unavailable, match=r"missing: (.*, )?qemu-aarch64"), counting(VARIANT):
        pass
