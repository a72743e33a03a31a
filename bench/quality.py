"""`python -m bench.quality`: the loss of computing with quantized weights.

The default model's weights are rounded to each type that the kernels keep, or, where llama.cpp is installed
(`bench/install/llamacpp.sh`) and `--peer` is given, stored in each by its `llama-quantize` and also computed by
llama.cpp. A matrix whose rows do not divide into a type's blocks keeps the type it has. Each model is computed by the
native kernels and, as the exact reference, in float32 from the same weights: what a type itself loses is not measured.
Ternary weights (TQ2_0) break a model that was not trained for them; its predictions then change with any rounding.
The text is our licence in windows of 512 tokens, of which the second half is predicted, as in `llama-perplexity`. The
figures are the perplexity relative to the exact one, and the divergence of the predictions in nats per token.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.kernels import PAGE
from bench.weight_types import TYPES
from tenuto.base.config import DEFAULT_MODEL, cache_dir
from tenuto.base.plan import PageCopies, Plan, RowSampling, TableChanges
from tenuto.base.sampling import GREEDY
from tenuto.exec.device import usable_cores
from tenuto.exec.forward import Forward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.native.build import Machine, library
from tenuto.kernels.native.library import loaded
from tenuto.models.config import ModelConfig
from tenuto.models.decoder import Decoder
from tenuto.models.gguf import GgufCheckpoint
from tenuto.models.native.program import NativeProgram
from tenuto.models.store import resolve
from tenuto.models.weights import StoredWeight
from tenuto.text.load import load_tokenizer

PEER_TYPES = (
    *(
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q4_K_M",
        "Q5_K_M",
        "Q6_K",
        "Q2_K",
        "Q3_K_M",
        "IQ4_NL",
        "IQ4_XS",
        "TQ2_0",
    ),
    "BF16",
)
TEXT = Path(__file__).parents[1] / "LICENSE"
WINDOW = 512
NO_INTS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss against the exact result: `perplexity` relative to the exact one, and `divergence` in nats per token."""

    perplexity: float
    divergence: float

    def __str__(self) -> str:
        return f"{100 * (self.perplexity - 1):+.2f} %, {self.divergence:.4f} nats"


Weights = list[tuple[str, StoredWeight]]


def rounded(kind: str, stored: StoredWeight) -> StoredWeight:
    """Returns a weight rounded to a type of `TYPES`, unless it is a vector or its rows do not fit."""
    multiple, make = TYPES[kind]
    if len(stored.shape) == 1 or stored.shape[1] % multiple:
        return stored
    return make(stored.decode())


def predictions(executor: ModelExecutor, windows: list[list[int]]) -> torch.Tensor:
    """Returns log-probabilities of the successors of all tokens, except the last, in the second half of each window:
    float32 [tokens, vocabulary]. Closes the executor."""
    pages = WINDOW // PAGE
    executor.prepare((pages,), 1)
    table = np.arange(pages, dtype=np.int32)
    found = []
    for number, window in enumerate(windows):
        plan = Plan(
            step=number + 1,
            rows=np.zeros(1, np.int32),
            starts=np.zeros(1, np.int32),
            counts=np.array([WINDOW], np.int32),
            tokens=np.array(window, np.int32),
            samples=np.array([WINDOW // 2], np.int32),
            tables=(TableChanges(table * 0, table, table),),
            copies=(PageCopies(NO_INTS, NO_INTS, NO_INTS),),
            states=(),
            sampling=((0, RowSampling(GREEDY)),),
        )
        found.append(torch.from_numpy(executor.logits(plan)[:-1]).log_softmax(dim=1))
    executor.close()
    return torch.cat(found)


def ours(config: ModelConfig, weights: Weights, kernels: str, windows: list[list[int]]) -> Loss:
    """Returns the loss of `kernels`."""
    native = loaded(library(cache_dir(), Machine.this(), kernels, print))
    forwards: tuple[Forward, ...] = (
        NativeForward(native, NativeProgram(config, weights, PAGE), usable_cores()),
        TorchForward(Decoder(config, weights, torch.device("cpu"), torch.float32), PAGE),
    )
    found, exact = (predictions(ModelExecutor(forward), windows) for forward in forwards)
    following = torch.tensor([token for window in windows for token in window[WINDOW // 2 + 1 :]])
    nats = [torch.nn.functional.nll_loss(each, following).item() for each in (found, exact)]
    divergence = torch.nn.functional.kl_div(found, exact, reduction="batchmean", log_target=True).item()
    return Loss(math.exp(nats[0] - nats[1]), divergence)


def read(path: Path) -> tuple[ModelConfig, Weights]:
    """Returns the model in a GGUF file."""
    checkpoint = GgufCheckpoint(path)
    return checkpoint.config.within(WINDOW), list(checkpoint.weights())


class LlamaCpp:
    """llama.cpp's programs; they write files below `place`."""

    def __init__(self, programs: Path, place: Path) -> None:
        self._programs, self._place = programs, place

    def store(self, source: Path, kind: str) -> Path:
        """Stores the weights of `source` as type `kind`; returns the file."""
        target = self._place / f"{source.stem}-{kind}.gguf"
        self._run("llama-quantize", "--allow-requantize", str(source), str(target), kind)
        return target

    def loss(self, path: Path) -> Loss:
        """Returns llama.cpp's loss with the weights at `path`."""
        exact, kept = self.store(path, "F32"), str(self._place / "exact")
        text = ["-f", str(TEXT), "-c", str(WINDOW), "-t", str(usable_cores()), "--kl-divergence-base", kept]
        self._run("llama-perplexity", "-m", str(exact), *text)
        told = self._run("llama-perplexity", "-m", str(path), *text, "--kl-divergence")
        exact.unlink()
        return Loss(_figure(r"Mean PPL\(Q\)/PPL\(base\)", told), _figure(r"Mean +KLD", told))

    def _run(self, program: str, *arguments: str) -> str:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a peer's program
        if done.returncode:
            sys.exit(f"{program} failed:\n{done.stderr}")
        return done.stdout + done.stderr


def _figure(name: str, told: str) -> float:
    found = re.search(rf"{name} *: *(-?[0-9.]+)", told)
    if found is None:
        sys.exit(f"llama-perplexity did not report {name}:\n{told}")
    return float(found[1])


def beside_llama_cpp(source: Path, kinds: list[str], kernels: str, windows: list[list[int]]) -> None:
    """Prints the table for types of llama.cpp; the first line is the model's own file."""
    programs = cache_dir() / "peers" / "llamacpp" / "build" / "bin"
    if not (programs / "llama-quantize").exists():
        sys.exit("llama.cpp is not installed: bench/install/llamacpp.sh")
    with tempfile.TemporaryDirectory() as place:
        llama = LlamaCpp(programs, Path(place))
        for kind in ("", *kinds):
            path = llama.store(source, kind) if kind else source
            mine, theirs = ours(*read(path), kernels, windows), llama.loss(path)
            print(f"{kind or 'the file itself':16}  Tenuto {mine}   llama.cpp {theirs}", flush=True)
            if kind:
                path.unlink()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--kernels", default=Machine.this().variants()[0], help="which native kernels")
    parser.add_argument("--types", help="by default all")
    parser.add_argument("--peer", action="store_true", help="with types that llama.cpp stores, and beside it")
    parser.add_argument("--windows", type=int, default=sys.maxsize, help="by default those of the whole text")
    chosen = parser.parse_args()
    source = resolve(DEFAULT_MODEL, cache_dir()).path
    tokens = load_tokenizer(source).encode(TEXT.read_text(encoding="utf-8"))
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens) - WINDOW + 1, WINDOW)][: chosen.windows]
    print(f"{chosen.kernels}, {len(windows)} windows of {WINDOW} tokens: perplexity over float32's, and divergence")
    kinds = (chosen.types or ",".join(PEER_TYPES if chosen.peer else TYPES)).split(",")
    if chosen.peer:
        beside_llama_cpp(source, kinds, chosen.kernels, windows)
        return
    config, stored = read(source)
    total = sum(math.prod(weight.shape) for _, weight in stored if len(weight.shape) > 1)
    for kind in kinds:
        weights = [(name, rounded(kind, weight)) for name, weight in stored]
        changed = sum(
            math.prod(old.shape) for (_, old), (_, new) in zip(stored, weights, strict=True) if old is not new
        )
        loss = ours(config, weights, chosen.kernels, windows)
        print(f"{kind:7} {100 * changed / total:4.0f} % of the weights   {loss}", flush=True)


if __name__ == "__main__":
    main()
