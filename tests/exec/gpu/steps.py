"""Steps written by hand, in which rows go on from what they have sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tenuto.base.plan import PREVIOUS_SAMPLE, RowSampling, StepResult
from tenuto.base.sampling import Sampling
from tenuto.exec.model_executor import ModelExecutor, ReadAdapter
from tenuto.exec.torch_forward import TorchForward
from tenuto.models.adapter import Adapter
from tests.exec.driver import Driver, Work, ints

P, KNOWN = PREVIOUS_SAMPLE, -2
"""Tokens of steps: what the row sampled in the step before; or in the last step of it, which has been collected."""


def carried_out(
    forward: TorchForward,
    steps: Sequence[Sequence[Work]],
    sampling: Sequence[Sampling | RowSampling],
    overlap: int,
    adapters: Sequence[Adapter] = (),
    slots: Sequence[int] = (),
) -> list[StepResult]:
    """Carries out `steps` of four rows with these options; with `overlap`, each is submitted before the one before it
    is collected. Rows have the `adapters` in these `slots`, counted from 1."""
    executor = ModelExecutor(forward)
    for slot, adapter in enumerate(adapters, start=1):
        executor.set_adapter(slot, ReadAdapter(adapter.digest, forward.packer(adapter)))
    driver, last = Driver(executor, 40, 4), dict.fromkeys(range(4), 0)
    found: list[StepResult] = []
    flying: list[list[Work]] = []

    def collect() -> None:
        rows = [row for row, _, samples in flying.pop(0) if samples]
        found.append(executor.collect())
        last.update(zip(rows, found[-1].tokens.tolist(), strict=True))

    for i, step in enumerate(steps):
        known: list[Work] = [
            (row, [last[row] if t == KNOWN else t for t in tokens], samples) for row, tokens, samples in step
        ]
        plan = driver.plan(known, sampling=() if i else list(enumerate(sampling)))
        own = ints([slots[row] for row, _, _ in known]) if slots else None
        executor.submit(replace(plan, adapters=own if own is not None and own.any() else None))
        flying.append(known)
        if len(flying) > overlap:
            collect()
    while flying:
        collect()
    executor.close()
    return found
