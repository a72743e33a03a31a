"""`python -m bench.quality`: the loss of computing with quantized weights, compared with llama.cpp's.

llama.cpp's `llama-quantize`, which `bench/install/llamacpp.sh` builds, stores the default model's weights in each type;
the first case is the model's own file. Each file is computed by the native kernels and, as the exact reference, in
float32. The text is our licence in windows of 512 tokens, of which the second half is predicted, as in
`llama-perplexity`. The figures are the perplexity relative to the exact one, and the divergence of the predictions in
nats per token. llama.cpp is compared with its own float32 computation of the same weights.
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
from tenuto.base.config import DEFAULT_MODEL, cache_dir
from tenuto.base.plan import PageCopies, Plan, RowSampling, TableChanges
from tenuto.base.sampling import GREEDY
from tenuto.exec.device import usable_cores
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.models.store import resolve
from tenuto.text.load import load_tokenizer

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K", "BF16")
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


def predictions(path: str, kernels: str, windows: list[list[int]]) -> torch.Tensor:
    """Returns log-probabilities of the successors of all tokens, except the last, in the second half of each window:
    float32 [tokens, vocabulary]."""
    dtype = "float32" if kernels == "torch" else None
    files = resolve(path, cache_dir())
    executor = load_executor(
        files, ExecutorOptions(PAGE, dtype=dtype, kernels=kernels, cache=cache_dir(), say=lambda _: None)
    )
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


def ours(path: str, kernels: str, windows: list[list[int]]) -> Loss:
    """Returns the loss of `kernels`."""
    found, exact = predictions(path, kernels, windows), predictions(path, "torch", windows)
    following = torch.tensor([token for window in windows for token in window[WINDOW // 2 + 1 :]])
    nats = [torch.nn.functional.nll_loss(each, following).item() for each in (found, exact)]
    divergence = torch.nn.functional.kl_div(found, exact, reduction="batchmean", log_target=True).item()
    return Loss(math.exp(nats[0] - nats[1]), divergence)


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


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--kernels", default="auto", help="which native kernels")
    parser.add_argument(
        "--types", default=",".join(TYPES), help=f"some of {','.join(TYPES)}, in addition to the file itself"
    )
    chosen = parser.parse_args()
    programs = cache_dir() / "peers" / "llamacpp" / "build" / "bin"
    if not (programs / "llama-quantize").exists():
        sys.exit("llama.cpp is not installed: bench/install/llamacpp.sh")
    source = resolve(DEFAULT_MODEL, cache_dir()).path
    tokens = load_tokenizer(source).encode(TEXT.read_text(encoding="utf-8"))
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    print(f"{len(windows)} windows of {WINDOW} tokens: perplexity over float32's, and divergence from it")
    with tempfile.TemporaryDirectory() as place:
        llama = LlamaCpp(programs, Path(place))
        for kind in ("", *chosen.types.split(",")):
            path = llama.store(source, kind) if kind else source
            mine, theirs = ours(str(path), chosen.kernels, windows), llama.loss(path)
            print(f"{kind or 'the file itself':16}  Tenuto {mine}   llama.cpp {theirs}", flush=True)
            if kind:
                path.unlink()


if __name__ == "__main__":
    main()
