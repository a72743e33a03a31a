"""`bench.kernels` counts the multiplications that steps compute."""

import pytest
from gguf import GGMLQuantizationType as Kind

from bench.arm import Work
from bench.kernels import PAGE, prefill_multiplications
from tenuto.kernels.native.library import OpKind
from tenuto.models.gguf import GgufCheckpoint
from tenuto.models.native.program import NativeProgram
from tests.exec.test_native_forward import WIDE
from tests.models.tiny import save_gguf


@pytest.mark.parametrize("tokens", [1, 9])
def test_multiplications_of_a_prefill_are_those_of_its_operations(tokens: int, tmp_path) -> None:
    checkpoint = GgufCheckpoint(save_gguf(tmp_path / "m.gguf", WIDE, Kind.Q4_1))
    program = NativeProgram(checkpoint.config, checkpoint.weights(), PAGE)
    operations = Work(1, 0, tokens).multiplications(program)
    made = sum(operations[kind].total() for kind in (OpKind.QKV, OpKind.ADD, OpKind.GATED))
    assert prefill_multiplications(program.config, tokens) == made
