"""Starting loads as little as possible."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.exec.kernels import any_variant

HYBRID = Path(__file__).parent.parent / "hybrid" / "model"
STORY = """
import sys
import tenuto
import tenuto.runtime.worker
import tenuto.serve.run

asked = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": {5: -3.0}, "logprobs": 2}
for model in sys.argv[1:]:
    with tenuto.Engine(model, context_length=256) as engine:
        first, second = engine.session(), engine.session()
        turns = [first.turn("Once", max_new_tokens=4, ignore_eos=True), second.turn("Two", max_new_tokens=4, **asked)]
        assert all(turn.result().committed for turn in turns)
assert "torch" not in sys.modules, "PyTorch is loaded"
"""


@pytest.mark.skipif(not any_variant, reason="native kernels cannot run here")
def test_pytorch_is_not_loaded_where_native_kernels_compute(smollm2_path: Path) -> None:
    """From a GGUF file, and from a safetensors file of bfloat16 with recurrent layers."""
    command = [sys.executable, "-c", STORY, str(smollm2_path), str(HYBRID)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
