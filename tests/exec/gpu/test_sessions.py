"""A real engine on captured steps: its sessions get the tokens that plain PyTorch gives them."""

import torch

from bench.gpu.sessions import Load, alone, take_turns
from bench.random_models import attention, model
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.gpu.fused import FUSED
from tenuto.models.decoder import Decoder
from tests.exec.gpu.conftest import DEVICE
from tests.exec.gpu.queue import HostQueue

LOAD = Load(sessions=3, turns=2, given=20, sampled=4)


def test_sessions_of_an_engine_get_what_plain_pytorch_samples_from_captured_steps() -> None:
    results, queue = [], HostQueue()
    for fused in (None, FUSED):
        torch.manual_seed(0)
        with torch.inference_mode():
            decoder = Decoder(model(1, 32, [attention(2, 1, 16)], 48, 101, 128), None, DEVICE, torch.float32, fused)
        executor = ModelExecutor(GpuForward(decoder, 32, queue) if fused else TorchForward(decoder, 32))
        taken = take_turns(executor, LOAD, rounds=1)
        results.append(taken.tokens)
        assert len(taken.first) == 6
        assert {len(each) for each in taken.tokens} == {8}
        executor.close()
    assert results[0] == results[1]
    assert queue.runs >= 8, "every step, those with prompts too, ran as captured"


def test_prompts_and_decodes_alone_are_measured() -> None:
    with torch.inference_mode():
        decoder = Decoder(model(1, 32, [attention(2, 1, 16)], 48, 101, 128), None, DEVICE, torch.float32)
    executor = ModelExecutor(TorchForward(decoder, 32))
    assert alone(executor, LOAD) > 0
    executor.close()
