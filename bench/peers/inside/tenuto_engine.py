"""`python tenuto_engine.py MODEL CONTEXT MEMORY_BYTES KV_CACHE_DTYPE KERNELS SPECULATE`: runs workloads on
Tenuto. The package describes input and output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from importlib.metadata import version
from typing import Any

import tenuto
from tenuto.api.engine import ModelOptions


async def converse(engine: tenuto.AsyncEngine, inputs: list[list[int]], output: int) -> list[dict[str, Any]]:
    """Runs all turns of one session."""
    told = []
    async with await engine.session() as session:
        for number, tokens in enumerate(inputs, 1):
            began, arrivals = time.perf_counter(), Counter[float]()
            turn = session.turn(tokens, max_new_tokens=output, ignore_eos=True)
            async for _ in turn.tokens():
                arrivals[time.perf_counter()] += 1
            usage = (await turn.result()).usage
            counts = {"prompt": usage.prompt, "cached": usage.cached, "generated": usage.generated}
            told.append({"number": number, "began": began, "arrivals": list(arrivals.items()), **counts})
    return told


async def answer(model: str, options: ModelOptions) -> None:
    """Answers workloads until standard input ends."""
    async with tenuto.AsyncEngine(model, **options) as engine:
        with os.fdopen(os.dup(1), "w") as answers:
            os.dup2(2, 1)  # keep libraries' output out of the answers
            print(version("tenuto"), file=answers, flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                asked = json.loads(line)
                began = time.perf_counter()
                told = await asyncio.gather(*(converse(engine, one, asked["output"]) for one in asked["inputs"]))
                seconds = time.perf_counter() - began
                said = {"seconds": seconds, "turns": [turn for session in told for turn in session]}
                print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    _, model, context, memory, kept_as, kernels, speculate = sys.argv
    given: ModelOptions = {
        "context_length": int(context),
        "memory_bytes": int(memory),
        "kv_cache_dtype": kept_as,
        "kernels": kernels,
        "speculate": speculate,
    }
    asyncio.run(answer(model, given))
