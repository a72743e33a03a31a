"""`python openvino_pipeline.py GGUF THREADS CACHE_GB KV_TYPE [lookup]`: runs workloads on OpenVINO GenAI, with `lookup`
with guesses from the prompt. The package describes input and output."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

GUESSES, NGRAM = 5, 3
"""The most tokens guessed in a step, and the most last tokens looked for in the prompt: as in its documentation."""


class Turn:
    """A running turn. `history`, the session's token ids, grows as tokens come."""

    def __init__(self, number: int, history: list[int], handle: Any) -> None:
        self.number = number
        self.history = history
        self.handle = handle
        self.prompt = len(history)
        self.began = time.perf_counter()
        self.arrivals: list[tuple[float, int]] = []

    def read(self) -> None:
        """Reads the tokens generated since the last call."""
        while self.handle.can_read():
            ids = [token for output in self.handle.read().values() for token in output.generated_ids]
            self.arrivals.append((time.perf_counter(), len(ids)))
            self.history += ids

    def told(self) -> dict[str, Any]:
        """Returns the turn's part of the answer. The engine does not report the number of cached tokens."""
        generated = sum(count for _, count in self.arrivals)
        counts = {"prompt": self.prompt, "cached": None, "generated": generated}
        return {"number": self.number, "began": self.began, "arrivals": self.arrivals, **counts}


class Pipeline:
    """A pipeline with prefix caching, as in a server."""

    def __init__(self, model: str, threads: int, cache_gb: int, kept_as: str, *, lookup: bool = False) -> None:
        import openvino  # noqa: PLC0415 - prints, so standard output must be redirected first
        import openvino_genai  # noqa: PLC0415

        self._openvino, self._genai = openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = cache_gb
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": kept_as}
        if lookup:
            properties["prompt_lookup"] = True
        self._lookup = lookup
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._requests = 0

    @property
    def version(self) -> str:
        return str(self._genai.__version__)

    def start(self, number: int, history: list[int], output: int) -> Turn:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
        if self._lookup:
            config.num_assistant_tokens, config.max_ngram_size = GUESSES, NGRAM
        tensor = self._openvino.Tensor(self._array([history]))
        self._requests += 1
        return Turn(number, history, self._pipeline.add_request(self._requests, tensor, config))

    def step(self) -> None:
        self._pipeline.step()

    def ended(self, turn: Turn) -> bool:
        return bool(turn.handle.get_status() != self._genai.GenerationStatus.RUNNING)

    @staticmethod
    def _array(rows: list[list[int]]) -> Any:
        import numpy as np  # noqa: PLC0415 - the peer's, not Tenuto's

        return np.array(rows, np.int64)


def run(pipeline: Pipeline, inputs: list[list[list[int]]], output: int) -> dict[str, Any]:
    """Runs all turns, one turn of each session at a time."""
    began = time.perf_counter()
    ended: list[Turn] = []
    running = {session: pipeline.start(1, list(turns[0]), output) for session, turns in enumerate(inputs)}
    while running:
        pipeline.step()
        for session, turn in list(running.items()):
            turn.read()
            if not pipeline.ended(turn):
                continue
            ended.append(running.pop(session))
            if turn.number < len(inputs[session]):
                turn.history += inputs[session][turn.number]
                running[session] = pipeline.start(turn.number + 1, turn.history, output)
    return {"seconds": time.perf_counter() - began, "turns": [turn.told() for turn in ended]}


def main() -> None:
    """Answers workloads until standard input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # keep libraries' output out of the answers
        pipeline = Pipeline(
            sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], lookup=sys.argv[5:] == ["lookup"]
        )
        print(pipeline.version, file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(run(pipeline, asked["inputs"], asked["output"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
