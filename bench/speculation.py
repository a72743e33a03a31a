"""`python -m bench.speculation`: tokens per second with guessed tokens and without, in one run.

Two engines, one of which guesses, take the same turns one after the other, in alternating order. Both must say the same
tokens. Workloads:

- edit: a source file is shown, and the beginning of its edited copy; the model goes on (one session).
- trace: an agent's session, in which results of tools are shown and quoted back.
- random: text drawn at temperature 1, which repeats nothing (one session, and sixteen).

With `--layers N` the default model gets layers that add nothing until it has N, so that it says the same and takes as
long as a larger model. The default model then is its draft model, which is always right, and then the first five of its
layers are, which are mostly wrong.

With `--head` the model's own head for multi-token prediction guesses, at each step that it is expected to pay.

Figures are of the time from the first output token on; medians of pairs, with the least and the greatest in brackets.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from tempfile import TemporaryDirectory
from typing import Protocol

from bench.layers import with_layers
from bench.spread import Spread
from tenuto.base.clock import SystemClock
from tenuto.base.config import DEFAULT_MODEL, EngineConfig, WorkerSettings, cache_dir
from tenuto.base.options import TurnParams, turn_params
from tenuto.engine.engine import Engine
from tenuto.models.store import pull_default
from tenuto.runtime.models import LOOKAHEAD, Model, draft_model, load_model
from tenuto.sched.draft_proposer import DraftProposer
from tenuto.sched.guesses import Proposer
from tenuto.sched.predictor_proposer import PredictorProposer
from tenuto.sched.suffix_proposer import SuffixProposer
from tenuto.session.turn import Turn
from tenuto.text.stream import TextStream
from tenuto.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
SHOWN = (ROOT / "src/tenuto/base/clock.py", ROOT / "bench/spread.py", ROOT / "src/tenuto/kernels/ragged.py")
"""The files that are edited."""
CONTEXT, PAGE, SAID = 4096, 32, 192
WRONG = 5
"""The number of layers of a draft model that is mostly wrong."""


@dataclass(frozen=True, slots=True)
class Round:
    """The inputs of sessions that run beside each other, each a text for every turn, and the options of all turns."""

    sessions: tuple[tuple[str, ...], ...]
    params: TurnParams


@dataclass(slots=True)
class Taken:
    """Tokens said, the seconds after the first of each turn, and guesses that were right and wrong."""

    outputs: list[list[int]]
    tokens: int = 0
    seconds: float = 0.0
    accepted: int = 0
    rejected: int = 0


def greedy(most: int) -> TurnParams:
    """Returns the options of turns that say exactly `most` tokens."""
    return turn_params({"max_new_tokens": most, "ignore_eos": True})


def edits(number: int) -> Round:
    """Returns an edit; others have another file or begin elsewhere."""
    text = SHOWN[number % len(SHOWN)].read_text(encoding="utf-8")[:3000]
    lines = text.splitlines(keepends=True)
    begun = "".join(lines[: 3 + number])
    return Round(((f"The file:\n\n{text}\nThe file, with a small change:\n\n{begun}",),), greedy(SAID))


def traces(number: int) -> Round:
    """Returns a session of five turns, each of which shows lines and begins to quote one."""
    rng, lines = Random(number), (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    turns = []
    for step in range(5):
        start = rng.randrange(len(lines) - 8)
        shown = lines[start : start + 8]
        quoted = rng.choice(shown[1:7])
        turns.append(f"\n\nResult {step} of the tool:\n" + "\n".join(shown) + f"\n\nThe tool found:\n{quoted[:24]}")
    return Round((tuple(turns),), greedy(48))


def drawn(number: int, sessions: int) -> Round:
    """Returns sessions that say whatever they draw."""
    params = turn_params({"max_new_tokens": 64, "ignore_eos": True, "temperature": 1.0, "seed": number})
    return Round(tuple((f"Once upon a time, number {number * sessions + i} said",) for i in range(sessions)), params)


WORKLOADS: dict[str, Callable[[int], Round]] = {
    "edit, 1 session": edits,
    "trace, 1 session": traces,
    "random, 1 session": partial(drawn, sessions=1),
    "random, 16 sessions": partial(drawn, sessions=16),
}


class Side:
    """An engine that guesses, or one that does not."""

    def __init__(self, name: str, kernels: str, *, guesses: bool, draft: str | None = None, head: bool = False) -> None:
        """`draft`: the name of a draft model; `head`: whether the model's head is what guesses."""
        self.model: Model = load_model(
            WorkerSettings(
                model=name, kernels=kernels, page_size=PAGE, config={"speculate": "mtp"} if head and guesses else {}
            )
        )
        predictor = PredictorProposer() if head and guesses else None
        assert self.model.tokenizer is not None
        self._tokenizer: Tokenizer = self.model.tokenizer
        context = min(CONTEXT, self.model.max_context)
        config = EngineConfig(context_length=context, lookahead=LOOKAHEAD if guesses else 0, prefix_cache=False)
        self._engine = Engine(
            self.model.executor,
            (max(40, 20 * context // PAGE),) * len(self.model.executor.spec.groups),
            config,
            vocab_size=self.model.vocab_size,
            eos_ids=self.model.eos_ids,
            clock=SystemClock(),
            random=SystemRandom(),
            text=partial(TextStream, self._tokenizer),
            proposer=(predictor or _proposer(draft, kernels, config)) if guesses else None,
            predictor=predictor,
        )

    def take(self, given: Round) -> Taken:
        """Takes the turns of a round."""
        names = [self._engine.sessions.open(None).id for _ in given.sessions]
        taken = Taken([])
        for texts in zip(*given.sessions, strict=True):
            turns = [
                self._engine.turns.submit(name, self._tokenizer.encode(text), given.params)
                for name, text in zip(names, texts, strict=True)
            ]
            taken.seconds += self._run(turns)
            for turn in turns:
                assert turn.result is not None
                taken.outputs.append(turn.output.tolist())
                taken.tokens += len(turn.output) - 1
                taken.accepted += turn.result.usage.accepted
                taken.rejected += turn.result.usage.rejected
        for name in names:
            self._engine.sessions.close(name)
        return taken

    def end(self) -> None:
        """Releases the engine and its models."""
        self._engine.end()
        self.model.executor.close()

    def _run(self, turns: list[Turn]) -> float:
        """Runs turns to their ends. Returns the seconds since all had their first token."""
        began = 0.0
        while not self._engine.idle:
            self._engine.step()
            if not began and all(turn.output for turn in turns):
                began = time.perf_counter()
        return time.perf_counter() - began


def _proposer(draft: str | None, kernels: str, config: EngineConfig) -> Proposer:
    if draft is None:
        return SuffixProposer()
    model = load_model(WorkerSettings(model=draft, kernels=kernels, page_size=PAGE))
    pages = config.max_running * config.context_length // PAGE
    return DraftProposer(draft_model(model, config, pages, SystemClock()), SuffixProposer())


class Taker(Protocol):
    """Takes the turns of rounds: an engine or a peer, which guesses or does not."""

    def take(self, given: Round) -> Taken:
        """Takes the turns of a round."""


def pairs(
    plain: Taker, guessing: Taker, workload: Callable[[int], Round], rounds: int
) -> Iterator[tuple[Taken, Taken]]:
    """Yields what both sides took for each round. The first does not count."""
    for number in range(rounds + 1):
        given = workload(number)
        order = (plain, guessing) if number % 2 else (guessing, plain)
        taken = {side: side.take(given) for side in order}
        if number:
            yield taken[plain], taken[guessing]


def compared(found: Sequence[tuple[Taken, Taken]]) -> str:
    """Returns a line that compares what two sides took."""
    ratios = Spread.of([(b.tokens / b.seconds) / (a.tokens / a.seconds) for a, b in found])
    rates = [statistics.median(side.tokens / side.seconds for side in sides) for sides in zip(*found, strict=True)]
    right, wrong = sum(b.accepted for _, b in found), sum(b.rejected for _, b in found)
    return (
        f"{rates[0]:6.1f} tokens/s without, {rates[1]:6.1f} with guesses: {ratios.shown('.2f')} times; "
        f"of {sum(b.tokens for _, b in found)} tokens {right} guessed, {wrong} guessed wrong"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=0, help="with draft models, beside a model of so many layers")
    parser.add_argument("--head", action="store_true", help="guess with the model's head for multi-token prediction")
    parser.add_argument("--only", default="", help="workloads whose names begin like this")
    arguments = parser.parse_args()
    workloads = {name: each for name, each in WORKLOADS.items() if name.startswith(arguments.only)}
    if not arguments.layers:
        measure(arguments.model, arguments.kernels, workloads, arguments.rounds, head=arguments.head)
        return
    source = pull_default(cache_dir())
    with TemporaryDirectory() as directory:
        large = str(with_layers(source, Path(directory) / "large.gguf", arguments.layers))
        wrong = str(with_layers(source, Path(directory) / "wrong.gguf", WRONG))
        for name, draft in (("none", None), (DEFAULT_MODEL, DEFAULT_MODEL), (f"its first {WRONG} layers", wrong)):
            print(f"draft model: {name}")
            measure(large, arguments.kernels, workloads, arguments.rounds, draft)


def measure(
    name: str,
    kernels: str,
    workloads: Mapping[str, Callable[[int], Round]],
    rounds: int,
    draft: str | None = None,
    *,
    head: bool = False,
) -> None:
    """Compares an engine that guesses, with a draft model or its head if they are asked for, with one that does not."""
    plain, guessing = Side(name, kernels, guesses=False), Side(name, kernels, guesses=True, draft=draft, head=head)
    print(plain.model.compute)
    for title, workload in workloads.items():
        found = list(pairs(plain, guessing, workload, rounds))
        assert all(plainly.outputs == guessed.outputs for plainly, guessed in found), "guesses changed tokens"
        print(f"{title:20} {compared(found)}", flush=True)
    for side in (plain, guessing):
        side.end()


if __name__ == "__main__":
    main()
