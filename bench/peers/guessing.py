"""`python -m bench.peers.guessing`: what peers gain by their own guesses, beside Tenuto, on the workloads of
`bench.speculation` with one session.

Each peer runs twice: with guesses, and without. llama.cpp guesses by `--spec-type ngram-mod`, OpenVINO GenAI by prompt
lookup. Both sides of a peer take the same turns one after the other, in alternating order. A peer that is not installed
is left out. OpenVINO does not say which guesses were right, and draws no tokens here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from bench.peers.catalog import CACHE_GIB, INSIDE, LLAMA_PROGRAMS, Setting
from bench.peers.processes import Group, free_port, started, wait_until_ready
from bench.speculation import CONTEXT, WORKLOADS, Round, Side, Taken, Taker, compared, pairs
from tenuto.text.load import load_tokenizer
from tenuto.text.tokenizer import Tokenizer

SECONDS = 300.0


class LlamaSide:
    """llama.cpp's server. Times are its own, from the first token on."""

    def __init__(self, url: str, tokenizer: Tokenizer) -> None:
        self._url, self._tokenizer = url, tokenizer

    def take(self, given: Round) -> Taken:
        """Takes the turns of a round with one session."""
        taken, history = Taken([]), list[int]()
        for text in _texts(given):
            history += self._tokenizer.encode(text)
            answer = self._complete(history, given)
            taken.outputs.append(answer["tokens"])
            history += answer["tokens"]
            timings = answer["timings"]
            taken.tokens += len(answer["tokens"]) - 1
            taken.seconds += timings["predicted_ms"] / 1000
            right = timings.get("draft_n_accepted", 0)
            taken.accepted += right
            taken.rejected += timings.get("draft_n", 0) - right
        return taken

    def _complete(self, history: Sequence[int], given: Round) -> dict[str, Any]:
        sampling = given.params.sampling
        body = {
            "prompt": history,
            "n_predict": given.params.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
        }
        found: dict[str, Any] = (
            httpx.post(f"{self._url}/completion", json=body, timeout=SECONDS).raise_for_status().json()
        )
        return found


class OpenVinoSide:
    """OpenVINO GenAI, in a process that reads workloads and writes when tokens came; see `bench.peers.inside`."""

    def __init__(self, group: Group, tokenizer: Tokenizer) -> None:
        self._group, self._tokenizer = group, tokenizer
        self._line()  # its version

    def take(self, given: Round) -> Taken:
        """Takes the turns of a round with one session."""
        inputs = [[self._tokenizer.encode(text) for text in _texts(given)]]
        assert self._group.process.stdin is not None
        print(
            json.dumps({"inputs": inputs, "output": given.params.max_new_tokens}),
            file=self._group.process.stdin,
            flush=True,
        )
        taken = Taken([])
        for turn in json.loads(self._line())["turns"]:
            times = [when for when, _ in turn["arrivals"]]
            taken.tokens += sum(count for _, count in turn["arrivals"][1:])
            taken.seconds += sum(after - before for before, after in pairwise(times))
        return taken

    def _line(self) -> str:
        assert self._group.process.stdout is not None
        if not (line := self._group.process.stdout.readline()):
            raise self._group.failure("it ended early")
        return line


def _texts(given: Round) -> tuple[str, ...]:
    [texts] = given.sessions
    return texts


def sides(stack: ExitStack, setting: Setting, logs: Path) -> Iterator[tuple[str, Taker, Taker]]:
    """Starts every installed peer twice. Yields its name, the side without guesses and the one with them."""
    yield "Tenuto", Side(setting.model, "auto", guesses=False), Side(setting.model, "auto", guesses=True)
    tokenizer = load_tokenizer(setting.gguf)
    if (setting.peers / "llamacpp/version").exists():
        plain = _llama(stack, setting, tokenizer, logs / "llama.log", [])
        guessing = _llama(stack, setting, tokenizer, logs / "llama-guessing.log", ["--spec-type", "ngram-mod"])
        yield "llama.cpp, ngram-mod", plain, guessing
    if (setting.peers / "openvino/version").exists():
        without = _openvino(stack, setting, tokenizer, logs / "openvino.log", [])
        looking = _openvino(stack, setting, tokenizer, logs / "openvino-guessing.log", ["lookup"])
        yield "OpenVINO GenAI, prompt lookup", without, looking


def _llama(stack: ExitStack, setting: Setting, tokenizer: Tokenizer, log: Path, options: list[str]) -> LlamaSide:
    port = free_port()
    command = [str(setting.peers / LLAMA_PROGRAMS / "llama-server"), "--model", str(setting.gguf)]
    command += ["--threads", str(setting.threads), "--parallel", "1", "--ctx-size", str(CONTEXT), "--port", str(port)]
    group = stack.enter_context(started([*command, *options], {}, log))
    wait_until_ready(group, f"http://127.0.0.1:{port}/health")
    return LlamaSide(f"http://127.0.0.1:{port}", tokenizer)


def _openvino(stack: ExitStack, setting: Setting, tokenizer: Tokenizer, log: Path, options: list[str]) -> OpenVinoSide:
    command = [str(setting.peers / "openvino/venv/bin/python"), str(INSIDE / "openvino_pipeline.py")]
    command += [str(setting.gguf), str(setting.threads), str(CACHE_GIB), "u8", *options]
    return OpenVinoSide(stack.enter_context(started(command, {}, log, piped=True)), tokenizer)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.guessing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        found = list(sides(stack, Setting.of_this_machine(), Path(logs)))
        for workload, given in WORKLOADS.items():
            if len(given(0).sessions) > 1:
                continue
            print(workload)
            for name, plain, guessing in found:
                if isinstance(plain, OpenVinoSide) and given(0).params.sampling.temperature:
                    continue
                taken = list(pairs(plain, guessing, given, rounds))
                same = sum(one.outputs == other.outputs for one, other in taken)
                said = f"; the same tokens in {same} of {len(taken)} rounds" if taken[0][0].outputs else ""
                print(f"  {name:30} {compared(taken)}{said}", flush=True)


if __name__ == "__main__":
    main()
