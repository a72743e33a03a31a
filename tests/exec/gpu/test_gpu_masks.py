"""A captured step whose masks never come is given up, and later steps go on."""

from concurrent.futures import CancelledError, Future
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.random_models import attention, model
from tenuto.base.errors import StepFailed
from tenuto.base.plan import TokenMasks, Words
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.kernels.gpu.fused import FUSED
from tenuto.models.decoder import Decoder
from tests.exec.driver import Driver
from tests.exec.gpu.conftest import DEVICE
from tests.exec.gpu.queue import HostQueue

VOCAB = 37


def test_masks_that_come_late_never_or_allow_nothing() -> None:
    with torch.inference_mode():
        config = model(1, 32, [attention(2, 1, 16)], 48, VOCAB, 64)
        queue = HostQueue()
        forward = GpuForward(Decoder(config, None, DEVICE, torch.float32, FUSED), 32, queue)
    executor = ModelExecutor(forward)
    driver = Driver(executor, 8, 3)
    first = driver.plan([(row, [1, 2, row], 1) for row in range(3)], sampling=[])
    executor.submit(first)
    free = executor.collect().tokens.tolist()

    def again(*given: Words | BaseException | None) -> list[int]:
        """Computes the same step again, in which rows have these masks."""
        masks = tuple(TokenMasks(i, Future()) for i in range(len(given)))
        executor.submit(replace(first, masks=masks))
        for each, known in zip(masks, given, strict=True):
            if isinstance(known, BaseException):
                each.allowed.cancel()
            else:
                each.allowed.set_result(known)
        return executor.collect().tokens.tolist()

    runs = queue.runs
    only = np.zeros((1, 2), np.uint32)
    only[0, 1] = 1 << 3  # token 35
    behind = np.zeros((1, 2), np.uint32)
    behind[0, 1] = 1 << 9  # behind the vocabulary
    assert again(None, only) == [free[0], 35, free[2]]
    assert queue.runs == runs + 2, "both parts ran as captured"
    with pytest.raises(StepFailed):
        again(only, CancelledError())
    assert again(only, behind, None) == [35, *free[1:]]
    assert again(only[:, :1], np.zeros((1, 9), np.uint32), only) == [*free[:2], 35]
    executor.submit(first)
    assert executor.collect().tokens.tolist() == free
    executor.close()
