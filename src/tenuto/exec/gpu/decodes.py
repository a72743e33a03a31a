"""Decode steps as captured work: the host writes the numbers of a step and goes on; the device does the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tenuto.exec.gpu.memory import DecodeAttention, GpuPages
from tenuto.exec.gpu.ring import Ring
from tenuto.exec.torch_memory import Memories
from tenuto.kernels.gpu.sampling import sample
from tenuto.kernels.gpu.steps import OWN, begin, change, finish
from tenuto.kernels.recurrent import Piece
from tenuto.models.decoder import Decoder


def captured(model: Decoder, memories: Memories, sampled: torch.Tensor, rows: int, ring: Ring) -> Callable[[], None]:
    """Captures the decode step of at most `rows` rows, and returns a function that queues it. `sampled`, int32 [row
    ids], are the tokens that rows sampled last."""
    attended = {g: pages for g, pages in memories.pages.items() if isinstance(pages, GpuPages)}
    each = torch.arange(rows, device=sampled.device)

    def step() -> None:
        given = begin(ring.entries, ring.fields, rows, sampled)
        for number, pages in enumerate(attended.values()):
            change(ring.entries, number, ring.fields, pages.table)
        tokens, owners, positions = given.numbers[:OWN]
        memory = memories.step_of(
            {g: DecodeAttention(pages, owners, positions) for g, pages in attended.items()},
            dict(zip(memories.states, given.numbers[OWN:].view(-1, 2, rows), strict=True)),
            (Piece(each, each[:, None]),),
        )
        logits = model.projected(model.normed(model.hidden(tokens, positions, memory)))
        finish(ring.entries, given, sample(logits, *given.choice), sampled)

    return ring.capture(step)
