"""Output with guesses equals output without, token for token, on real models.

`python -m tests.numerics.test_guesses 10000` compares 10,000 turns of the default model and the trained hybrid, in
every variant of the kernels that the CPU has, with 16-bit and 8-bit keys and values, with and without overlap.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import pytest

from bench.layers import with_layers
from tenuto.base.config import DEFAULT_MODEL, EngineConfig, WorkerSettings
from tenuto.base.errors import ConfigError
from tenuto.base.options import TurnOptions, turn_params
from tenuto.engine.engine import Engine
from tenuto.runtime.models import LOOKAHEAD, Model, draft_model, load_model
from tenuto.sched.draft_proposer import DRAFT, DraftProposer
from tenuto.sched.guesses import Guesses, NextStep, Proposer
from tenuto.sched.predictor_proposer import PredictorProposer
from tenuto.sched.suffix_proposer import SuffixProposer
from tenuto.session.turn import Turn
from tenuto.text.grammars import GrammarCompiler
from tenuto.text.stream import TextStream
from tests.clock import ManualClock
from tests.exec.eager import Eager
from tests.exec.kernels import EXACT, HERE, every_variant, needs_variant
from tests.hybrid.predictor import with_predictor
from tests.present import present

LICENCE = Path(__file__).parents[2] / "LICENSE"
HYBRID = Path(__file__).parents[1] / "hybrid" / "model"
PAGE, CONTEXT, SESSIONS, UNITS = 16, 320, 12, 300
RUNNING = 8
"""Turns that run at once. Each session takes a turn, and all have ended before the next ones."""
OPTIONS: tuple[TurnOptions, ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.4, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": {260: 3.0}, "logprobs": 0},
    {"min_new_tokens": 6},
    {"stop": (" the", "."), "temperature": 0.5},
    {"stop_regex": ("[a-z]{9}",), "include_stop": True},
    {"allowed_ids": tuple(range(200, 900))},
    {"grammar": {"regex": "([a-z]{1,8} ){2,30}end"}},
    {"grammar": {"json_schema": {"type": "array", "items": {"type": "string"}}}, "temperature": 0.8},
    {"ignore_eos": True, "temperature": 0.3},
    {"speculate": False},
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn to submit."""

    tokens: Sequence[int]
    options: TurnOptions


@dataclass(slots=True)
class Said:
    """The output of turns, in the order of their submission: tokens, how they ended, and log-probabilities."""

    outputs: list[list[int]] = field(default_factory=list)
    ends: list[object] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    accepted: int = 0
    rejected: int = 0
    steps: int = 0
    drafted: int = 0
    drafted_right: int = 0
    """Of the guesses of a draft model, how many were tried, and accepted."""


class Knowing(Proposer):
    """Guesses from what was said without guesses, with a fifth of the tokens wrong, and beyond the ends of turns."""

    def __init__(self, said: Said) -> None:
        self._said, self._rng = said, Random(3)

    def propose(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[Guesses]:
        return [self._guess(turn, limit) for turn, limit in zip(turns, limits, strict=True)]

    def _guess(self, turn: Turn, limit: int) -> Guesses:
        said = [*self._said.outputs[turn.number - 1], 5, 6, 7][len(turn.output) :]
        tokens = [token if self._rng.random() < 0.8 else self._rng.randrange(500) for token in said[:limit]]
        return Guesses(tokens, [1.0] * len(tokens))


def asked_turns(model: Model, turns: int, seed: int) -> list[Asked]:
    """Returns turns whose inputs repeat themselves, and parts of other turns' inputs."""
    rng, tokenizer = Random(seed), present(model.tokenizer)
    text = tokenizer.encode(LICENCE.read_text(encoding="utf-8"))
    asked = []
    for _ in range(turns):
        start = rng.randrange(400)
        phrase = text[start : start + rng.randint(4, 12)]
        tokens = (phrase * 3)[: rng.randint(2, 30)]
        options: TurnOptions = {"seed": rng.randrange(100), **rng.choice(OPTIONS)}
        options["max_new_tokens"] = rng.randint(max(1, options.get("min_new_tokens", 0)), 24)
        asked.append(Asked(tokens, options))
    return asked


def engine_of(
    model: Model, overlap: int, proposer: Proposer | None, predictor: PredictorProposer | None = None
) -> Engine:
    config = EngineConfig(
        context_length=CONTEXT,
        max_running=RUNNING,
        token_budget=128,
        overlap=overlap,
        lookahead=LOOKAHEAD if proposer is not None else 0,
        audit_every=50,
    )
    units = (UNITS,) * len(model.executor.spec.groups)
    return Engine(
        model.executor,
        units,
        config,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        clock=ManualClock(),
        random=Random(0),
        text=partial(TextStream, present(model.tokenizer)),
        proposer=proposer,
        predictor=predictor,
    )


def say(
    model: Model,
    asked: Sequence[Asked],
    overlap: int,
    proposer: Proposer | None = None,
    predictor: PredictorProposer | None = None,
) -> Said:
    """Returns what the turns say, which go through the sessions in order. Sessions that are full begin anew."""
    engine, said = engine_of(model, overlap, proposer, predictor), Said()
    compiler: GrammarCompiler = present(model.grammars())
    turns: list[Turn] = []
    names: dict[int, str] = {}
    for number, one in enumerate(asked):
        place = number % SESSIONS
        if place not in names or engine.registry.get(names[place]).context_left < len(one.tokens) + 25:
            if place in names:
                engine.sessions.close(names[place])
            names[place] = f"s{number}"
            engine.sessions.open(names[place])
        params = turn_params(one.options)
        constraint = compiler.constraint(params.grammar) if params.grammar is not None else None
        turns.append(engine.turns.submit(names[place], one.tokens, params, constraint=constraint))
        while (place == SESSIONS - 1 or number == len(asked) - 1) and not engine.idle:
            engine.step()
    for turn in turns:
        result = present(turn.result)
        said.outputs.append(turn.output.tolist())
        said.ends.append((result.reason, result.stop, result.kept, present(turn.text).take_text()))
        said.logprobs.append(turn.output_logprobs)
        said.accepted += result.usage.accepted
        said.rejected += result.usage.rejected
    said.steps = engine.steps
    said.drafted, said.drafted_right = engine.guessed[DRAFT], engine.accepted[DRAFT]
    engine.end()
    return said


def opened(name: str, kernels: str, kv_cache_dtype: str = "auto") -> Model:
    return load_model(WorkerSettings(model=name, kernels=kernels, kv_cache_dtype=kv_cache_dtype, page_size=PAGE))


def compared(name: str, kernels: str, kept_as: str, overlap: int, turns: int, seed: int = 0) -> tuple[Said, Said]:
    """Compares turns without guesses, with guesses from the suffix index, and with right and wrong ones. Returns what
    the latter two said."""
    settings = name, kernels, kept_as

    def run(proposer: Proposer | None) -> Said:
        model = opened(*settings)
        try:
            return say(model, asked_turns(model, turns, seed), overlap, proposer)
        finally:
            model.executor.close()

    plain = run(None)
    guessed = run(SuffixProposer()), run(Knowing(plain))
    for said in guessed:
        assert said.outputs == plain.outputs
        assert said.ends == plain.ends
        assert said.logprobs == plain.logprobs
    return guessed


@every_variant
@pytest.mark.parametrize("kept_as", ["auto", "int8"])
@pytest.mark.parametrize("name", [DEFAULT_MODEL, str(HYBRID)], ids=["default", "hybrid"])
def test_guesses_change_no_token_text_or_log_probability(name: str, variant: str, kept_as: str) -> None:
    if variant == "amx":
        pytest.skip("steps of few rows are rounded as others only where their turns are the same; see the docs")
    suffixes, knowing = compared(name, variant, kept_as, overlap=int(kept_as == "int8"), turns=16)
    assert suffixes.accepted + suffixes.rejected > 0
    assert knowing.accepted > 5
    assert knowing.rejected > 5


@needs_variant
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(("layers", "drafted"), [(30, 10), (5, 0)], ids=["itself", "its first layers"])
def test_guesses_of_a_draft_model_change_nothing(
    smollm2_path: Path, tmp_path: Path, layers: int, drafted: int, overlap: int
) -> None:
    """Its first layers alone are mostly wrong; the model itself is wrong where turns have penalties or grammars.
    Guesses cost no time by the clock, so their number depends on the sampled tokens alone."""
    draft = opened(str(with_layers(smollm2_path, tmp_path / "draft.gguf", layers)), EXACT)

    def run(*, guesses: bool) -> Said:
        model, proposer = opened(DEFAULT_MODEL, EXACT).with_draft(draft), None
        if guesses:
            config = EngineConfig(context_length=CONTEXT, max_running=RUNNING)
            proposer = DraftProposer(draft_model(draft, config, 60, ManualClock()), SuffixProposer())
        try:
            return say(model, asked_turns(model, 24, seed=7), overlap, proposer)
        finally:
            model.executor.close()

    plain, guessed = run(guesses=False), run(guesses=True)
    assert (guessed.outputs, guessed.ends, guessed.logprobs) == (plain.outputs, plain.ends, plain.logprobs)
    assert guessed.accepted + guessed.rejected > 10
    assert guessed.drafted >= drafted
    assert guessed.drafted_right >= guessed.drafted / 3 or layers < 30


@every_variant
@pytest.mark.parametrize("overlap", [0, 1])
def test_guesses_of_a_trained_head_change_nothing(tmp_path: Path, variant: str, overlap: int) -> None:
    if variant == "amx":
        pytest.skip("steps of few rows are rounded as others only where their turns are the same; see the docs")
    name = str(with_predictor(tmp_path / "model"))

    def run(predictor: PredictorProposer | None) -> Said:
        model = load_model(WorkerSettings(model=name, kernels=variant, page_size=PAGE, config={"speculate": "mtp"}))
        try:
            return say(model, asked_turns(model, 24, seed=5), overlap, predictor, predictor)
        finally:
            model.executor.close()

    plain, guessed = run(None), run(Eager())
    assert (guessed.outputs, guessed.ends, guessed.logprobs) == (plain.outputs, plain.ends, plain.logprobs)
    assert guessed.accepted > 20
    assert guessed.rejected > 20


@needs_variant
def test_models_without_a_head_are_refused_where_it_is_to_guess() -> None:
    model = load_model(WorkerSettings(model=str(HYBRID), page_size=PAGE, config={"speculate": "mtp"}))
    with pytest.raises(ConfigError, match="no head for multi-token prediction"):
        model.configured({"speculate": "mtp"})
    model.executor.close()


@needs_variant
@pytest.mark.parametrize("name", [DEFAULT_MODEL, str(HYBRID)], ids=["default", "hybrid"])
def test_where_guesses_change_nothing_they_are_made_unless_switched_off(name: str) -> None:
    model = opened(name, "auto", "auto")
    assert model.configured({}).lookahead == (LOOKAHEAD if model.executor.batch_invariant else 0)
    assert model.configured({"speculate": "off"}).lookahead == 0
    model.executor.close()


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.numerics.test_guesses", description=__doc__)
    parser.add_argument("turns", type=int)
    parser.add_argument("--kernels", nargs="*", default=HERE.variants(), help="variants, by default all")
    arguments = parser.parse_args()
    settings = list(product((DEFAULT_MODEL, str(HYBRID)), arguments.kernels, ("auto", "int8"), (0, 1)))
    each = -(-arguments.turns // len(settings))
    for seed, (name, kernels, kept_as, overlap) in enumerate(settings):
        began = time.monotonic()
        for said in compared(name, kernels, kept_as, overlap, each, seed):
            print(
                f"{Path(name).name} {kernels} {kept_as} overlap {overlap}: {each} turns, {said.steps} steps, "
                f"{sum(map(len, said.outputs))} tokens, {said.accepted} guesses accepted, {said.rejected} rejected"
            )
        print(f"  all equal, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
