"""Turns whose guesses come from the model's head say what they say without guesses, and have them accepted if the head
is right."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from tenuto.base.config import EngineConfig, cache_dir
from tenuto.base.errors import ConfigError
from tenuto.base.options import TurnOptions, turn_params
from tenuto.engine.engine import Engine
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.models.store import resolve
from tenuto.sched.predictor_proposer import PredictorProposer
from tenuto.session.turn import Turn
from tests.clock import ManualClock
from tests.exec.eager import Eager
from tests.exec.kernels import KERNELS
from tests.models.tiny_hybrids import VOCABULARY
from tests.models.tiny_predictor import Reference
from tests.present import present

PAGE, LOOKAHEAD = 16, 6
OPTIONS: tuple[TurnOptions, ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 20, "logprobs": 2},
    {"repetition_penalty": 1.3, "temperature": 0.5, "seed": 3},
    {"stop_ids": (7, 8, 9, 10)},
    {"speculate": False},
)


@dataclass
class Said:
    outputs: list[list[int]]
    logprobs: list[object]
    accepted: int
    rejected: int


def saved(directory: Path, *, right: bool) -> Path:
    """Writes a random model with a random head, or one in which the next token depends on the last one alone, and the
    head knows it: no layer adds anything, and the head passes the embedding of the last token on."""
    Reference().save(directory)
    if not right:
        return directory
    path = directory / "model.safetensors"
    tensors = load_file(path)
    hidden = tensors["mtp.fc.weight"].shape[0]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            tensor.zero_()
    tensors["mtp.fc.weight"] = torch.eye(hidden, 2 * hidden)
    tensors["mtp.pre_fc_norm_embedding.weight"].zero_()
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path)
    return directory


@pytest.fixture(scope="module", params=[False, True], ids=["random head", "right head"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    return saved(tmp_path_factory.mktemp("head"), right=request.param), request.param


@pytest.fixture(params=KERNELS)
def executor(request: pytest.FixtureRequest, model: tuple[Path, bool]) -> Iterator[ModelExecutor]:
    options = ExecutorOptions(PAGE, context=256, kernels=request.param, predictor=True, cache=cache_dir())
    made = load_executor(resolve(str(model[0]), model[0]), options)
    yield made
    made.close()


def said(executor: ModelExecutor, overlap: int, predictor: PredictorProposer | None) -> Said:
    """Runs turns of two sessions and of forks and rewinds of them."""
    config = EngineConfig(
        context_length=256,
        max_running=4,
        token_budget=48,
        overlap=overlap,
        lookahead=LOOKAHEAD if predictor is not None else 0,
        audit_every=1,
    )
    engine = Engine(
        executor,
        (90,) * len(executor.spec.groups),
        config,
        vocab_size=VOCABULARY,
        eos_ids=(),
        clock=ManualClock(),
        random=Random(0),
        proposer=predictor,
        predictor=predictor,
    )
    rng, turns = Random(4), list[Turn]()
    for name in ("a", "b"):
        engine.sessions.open(name)
    for number, options in enumerate(OPTIONS):
        for name in ("a", "b"):
            tokens = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 20))]
            turns.append(
                engine.turns.submit(name, tokens, turn_params({**options, "max_new_tokens": rng.randint(1, 30)}))
            )
        while not engine.idle:
            engine.step()
        if number % 3 == 2:
            engine.sessions.rewind("a", position=len(engine.registry.get("a").history) - rng.randrange(20))
            engine.sessions.close("b")
            engine.sessions.fork("a", child="b")
    found = Said(
        [turn.output.tolist() for turn in turns],
        [turn.output_logprobs for turn in turns],
        sum(present(turn.result).usage.accepted for turn in turns),
        sum(present(turn.result).usage.rejected for turn in turns),
    )
    engine.audit()
    engine.end()
    return found


@pytest.mark.parametrize("overlap", [0, 1])
def test_output_is_the_same_with_guesses_of_a_head_and_without(
    executor: ModelExecutor, model: tuple[Path, bool], overlap: int
) -> None:
    plain, guessed = said(executor, overlap, None), said(executor, overlap, Eager())
    if executor.batch_invariant and "amx" not in executor.forward.description:
        assert guessed.outputs == plain.outputs
        assert guessed.logprobs == plain.logprobs
    assert guessed.accepted + guessed.rejected > 100
    if model[1]:
        assert guessed.accepted > 3 * guessed.rejected  # penalties change what it would say


def test_a_proposer_for_a_head_needs_a_model_that_has_one(model: tuple[Path, bool]) -> None:
    without = load_executor(resolve(str(model[0]), model[0]), ExecutorOptions(PAGE, context=256))
    with pytest.raises(ConfigError, match="no head"):
        said(without, 0, PredictorProposer())
    without.close()
