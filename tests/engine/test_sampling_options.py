"""Sampling options of turns, on a small real model: tokens and log-probabilities equal those of a naive loop over whole
sequences, no matter how steps are cut, overlapped, preempted and failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from tenuto.base.config import EngineConfig
from tenuto.base.errors import InvalidRequest, StepFailed
from tenuto.base.groups import Kind
from tenuto.base.options import TurnParams, turn_params
from tenuto.base.plan import Plan, StepResult
from tenuto.base.sampling import Candidate, Sampling, TokenLogprob
from tenuto.base.turns import EndReason, TurnState
from tenuto.base.views import Transition
from tenuto.engine.engine import Engine
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.row_edits import HostEdits
from tenuto.models.store import ModelFiles, resolve
from tenuto.session.turn import Turn
from tests.clock import ManualClock
from tests.engine.by_definition import check_logprobs, raw_logits, said
from tests.engine.stage import Guesser, Stage, continuation, count_from, every_mix, every_overlap
from tests.models.tiny import save_hf, tiny_llama

VOCAB = 101
PLAIN = Sampling()
REPEATING = Sampling(repetition_penalty=1.4, frequency_penalty=0.7)
EVERYTHING = Sampling(1.3, 60, 0.97, 5, 0.013, 1.2, 0.6, -0.4, ((3, 4.5), (60, -100.0)))
BIASED = Sampling(0.8, seed=9, logit_bias=((17, 8.0),))
LIMITED = Sampling(0.9, seed=4, repetition_penalty=1.3, allowed_ids=(3, 17, 60, 61, 90, 100))
NAMED = (100, 3, 3, 17)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def files(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    directory = save_hf(tmp_path_factory.mktemp("tiny"), model)
    return resolve(str(directory), directory)


class FailingExecutor(ModelExecutor):
    """Keeps its plans. Steps with these numbers fail after they are computed."""

    failing: Sequence[int] = ()

    def __init__(self, executor: ModelExecutor) -> None:
        super().__init__(executor.forward)
        self.plans: list[Plan] = []

    def submit(self, plan: Plan) -> None:
        self.plans.append(plan)
        super().submit(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        if len(self.plans) in self.failing:
            raise StepFailed("told to fail")
        return result


ROWS = np.arange(4)
"""All rows of the engine."""


def counted(executor: ModelExecutor) -> int:
    """Returns the number of rows whose tokens are counted."""
    edits = executor._options.edits
    assert isinstance(edits, HostEdits)
    return len(edits._counts)


Start = Callable[..., Engine]


@pytest.fixture
def start(files: ModelFiles) -> Iterator[Start]:
    """Returns a function that makes engines on the small model, configured by keyword."""
    made: list[ModelExecutor] = []

    def engine(**config: Any) -> Engine:
        executor = FailingExecutor(load_executor(files, ExecutorOptions(page_size=4)))
        made.append(executor)
        proposer, text = config.pop("proposer", None), config.pop("text", None)
        usual = {"context_length": 200, "max_running": 4, "token_budget": 12, "audit_every": 1}
        return Engine(
            executor,
            (200,),
            EngineConfig(**{**usual, **config}),
            vocab_size=VOCAB,
            eos_ids=(),
            clock=ManualClock(),
            random=Random(0),
            proposer=proposer,
            text=text,
        )

    yield engine
    for executor in made:
        executor.close()


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def executor_of(engine: Engine) -> FailingExecutor:
    executor = engine._flights._executor
    assert isinstance(executor, FailingExecutor)
    return executor


def play(engine: Engine) -> None:
    while not engine.idle:
        engine.step()
    engine.step()


def preempt_when(engine: Engine, turn: Turn, condition: Callable[[Turn], object]) -> None:
    until(engine, lambda: condition(turn))
    engine.pressure.preempt(turn)


def until(engine: Engine, condition: Callable[[], object]) -> None:
    for _ in range(200):
        if condition():
            return
        engine.step()
    assert condition()


def outputs(turn: Turn) -> list[int]:
    return turn.output.tolist()


@every_overlap
@pytest.mark.parametrize("budget", [5, 64])
def test_turns_with_different_options_share_steps_and_each_gets_its_own(
    model: LlamaForCausalLM, start: Start, overlap: int, budget: int
) -> None:
    engine = start(overlap=overlap, token_budget=budget)
    asked = [PLAIN, REPEATING, EVERYTHING, BIASED, LIMITED]
    turns = []
    for i, sampling in enumerate(asked):
        engine.sessions.open(f"s{i}")
        turns.append(engine.turns.submit(f"s{i}", text(5 + 4 * i, i), TurnParams(max_new_tokens=12, sampling=sampling)))
    play(engine)
    for turn, sampling in zip(turns, asked, strict=True):
        assert outputs(turn) == said(model, turn.input.tolist(), TurnParams(max_new_tokens=12, sampling=sampling))
    assert len({tuple(outputs(turn)) for turn in turns}) == 5
    assert set(outputs(turns[4])) <= set(LIMITED.allowed_ids)
    assert outputs(turns[1]) != said(model, turns[1].input.tolist(), TurnParams(max_new_tokens=12))


@every_overlap
def test_penalties_count_this_turns_output_and_repetition_also_counts_the_history(
    model: LlamaForCausalLM, start: Start, overlap: int
) -> None:
    engine = start(overlap=overlap)
    engine.sessions.open("s")
    params = TurnParams(max_new_tokens=8, sampling=REPEATING)
    history: list[int] = []
    for seed in range(3):
        turn = engine.turns.submit("s", text(6, seed), params)
        play(engine)
        history += text(6, seed)
        assert outputs(turn) == said(model, history, params)
        history += outputs(turn)


@every_overlap
@pytest.mark.parametrize("sampling", [REPEATING, EVERYTHING, BIASED], ids=["repeating", "everything", "biased"])
def test_a_preempted_turn_continues_as_if_uninterrupted(
    model: LlamaForCausalLM, start: Start, overlap: int, sampling: Sampling
) -> None:
    engine = start(overlap=overlap)
    for name in "ab":
        engine.sessions.open(name)
    params = TurnParams(max_new_tokens=14, sampling=sampling, logprobs=3, min_new_tokens=9, stop_ids=(50, 51))
    turn = engine.turns.submit("a", text(9), params)
    until(engine, lambda: len(turn.output) >= 4)
    engine.pressure.preempt(turn)
    other = engine.turns.submit("b", text(20, 1), TurnParams(max_new_tokens=3, sampling=REPEATING))
    until(engine, lambda: len(turn.output) >= 11 or turn.state.ended)
    if not turn.state.ended:
        engine.pressure.preempt(turn)
    play(engine)
    expected = said(model, text(9), params)
    assert outputs(turn) == expected
    check_logprobs(turn.output_logprobs, expected, raw_logits(model, text(9) + expected)[8:-1], 3)
    assert outputs(other) == said(model, text(20, 1), other.params)


@every_overlap
def test_a_failed_step_leaves_no_trace_in_the_counts(model: LlamaForCausalLM, start: Start, overlap: int) -> None:
    engine = start(overlap=overlap)
    executor_of(engine).failing = (4, 5, 11)
    asked = [REPEATING, EVERYTHING]
    turns = []
    for i, sampling in enumerate(asked):
        engine.sessions.open(f"s{i}")
        named: tuple[int, ...] = NAMED if i else ()
        params = TurnParams(max_new_tokens=10, sampling=sampling, logprobs=0, input_logprobs=1, logprob_ids=named)
        turns.append(engine.turns.submit(f"s{i}", text(20, i), params))
    play(engine)
    assert engine.transitions[Transition("step failed")] in (2, 3)  # one may be in flight behind another that fails
    for turn in turns:
        prompt = turn.input.tolist()
        logits = raw_logits(model, prompt + outputs(turn))
        assert outputs(turn) == said(model, prompt, turn.params)
        named = turn.params.logprob_ids
        check_logprobs(turn.output_logprobs, outputs(turn), logits[19:-1], 0, named)
        check_logprobs(turn.input_scores, prompt[1:], logits[:19], 1, named)


@every_overlap
@pytest.mark.parametrize("budget", [3, 64])
def test_every_input_token_is_scored_once_given_the_tokens_before_it(
    model: LlamaForCausalLM, start: Start, overlap: int, budget: int
) -> None:
    engine = start(overlap=overlap, token_budget=budget, max_running=2)
    engine.sessions.open("s")
    history: list[int] = []
    for turn_number, output in enumerate([4, 0, 4, 1]):
        given = text(17 - 5 * turn_number, turn_number)
        turn = engine.turns.submit("s", given, TurnParams(max_new_tokens=output, input_logprobs=turn_number))
        if turn_number == 2:  # in the middle of the input, and again in the middle of the output
            preempt_when(engine, turn, lambda turn: turn.input_scores or turn.output)
            preempt_when(engine, turn, lambda turn: len(turn.output) == 2)
        play(engine)
        scores = turn.input_logprobs
        assert len(scores) == len(given)
        if not history:
            assert scores[0] is None
        scored = [entry for entry in scores if entry is not None]
        sequence = history + given
        logits = raw_logits(model, sequence)[:-1]
        check_logprobs(scored, sequence[-len(scored) :], logits[len(logits) - len(scored) :], turn_number)
        history = sequence + outputs(turn)


def test_no_step_scores_more_tokens_than_its_memory_allows(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenuto.sched.planner.MAX_SCORES", 7)
    engine = start(token_budget=64)
    turns = []
    for i in range(3):
        engine.sessions.open(f"s{i}")
        asked = 0 if i else None
        turns.append(engine.turns.submit(f"s{i}", text(30, i), TurnParams(max_new_tokens=3, input_logprobs=asked)))
    play(engine)
    plans = executor_of(engine).plans
    assert plans[0].counts.max() == 30  # turns without scores are not limited
    assert max(len(plan.scores.offsets) for plan in plans if plan.scores is not None) <= 7
    assert [len(turn.input_logprobs) for turn in turns] == [0, 30, 30]


def test_the_first_token_of_a_session_has_no_score_even_if_it_is_the_only_one(start: Start) -> None:
    engine = start()
    engine.sessions.open("s")
    turn = engine.turns.submit("s", [5], TurnParams(max_new_tokens=0, input_logprobs=2))
    play(engine)
    assert turn.input_logprobs == (None,)
    empty = engine.turns.submit("s", [], TurnParams(max_new_tokens=1, input_logprobs=2))
    play(engine)
    assert empty.input_logprobs == ()


@every_overlap
def test_stop_ids_are_masked_among_the_first_tokens(model: LlamaForCausalLM, start: Start, overlap: int) -> None:
    engine = start(overlap=overlap)
    prompt, most = text(11), tuple(range(20, 84))
    for least in (0, 1, 3, 5):
        engine.sessions.open(f"s{least}")
        params = TurnParams(max_new_tokens=12, stop_ids=most, min_new_tokens=least)
        turn = engine.turns.submit(f"s{least}", prompt, params)
        play(engine)
        assert outputs(turn) == said(model, prompt, params)
        assert not set(outputs(turn)[:least]) & set(most)
        assert turn.result is not None
        assert turn.result.reason is EndReason.STOP
        assert turn.result.stop == turn.output[-1]


class Oracle:
    """Guesses a turn's output; remembers the turns it was asked about."""

    def __init__(self) -> None:
        self.asked: set[int] = set()
        self.output: list[int] = []

    def guess(self, turn: Turn, limit: int) -> list[int]:
        self.asked.add(turn.number)
        return self.output[len(turn.output) :][:limit]


@every_overlap
def test_guessed_tokens_have_logprobs_and_turns_with_penalties_get_guesses_too(
    model: LlamaForCausalLM, start: Start, overlap: int
) -> None:
    oracle, prompt = Oracle(), text(11)
    engine = start(overlap=overlap, lookahead=3, proposer=Guesser(oracle.guess))
    plain = TurnParams(max_new_tokens=10, logprobs=2)
    oracle.output = [*said(model, prompt, plain)[:7], 0, 0, 0]
    asked = [plain, TurnParams(max_new_tokens=10, sampling=REPEATING), TurnParams(max_new_tokens=10, min_new_tokens=3)]
    turns = []
    for i, params in enumerate(asked):
        engine.sessions.open(f"s{i}")
        turns.append(engine.turns.submit(f"s{i}", prompt, params))
    play(engine)
    assert [outputs(turn) for turn in turns] == [said(model, prompt, params) for params in asked]
    assert oracle.asked == {turn.number for turn in turns}
    check_logprobs(turns[0].output_logprobs, outputs(turns[0]), raw_logits(model, prompt + outputs(turns[0]))[10:-1], 2)


def test_turns_without_options_cost_nothing_extra(start: Start) -> None:
    engine = start()
    executor = executor_of(engine)
    engine.sessions.open("s")
    turn = engine.turns.submit("s", text(9), TurnParams(max_new_tokens=5, sampling=Sampling(1.0, 5, 0.9, min_p=0.1)))
    until(engine, lambda: turn.output)
    assert executor._options.plain(ROWS)
    assert not counted(executor)
    play(engine)
    assert all(plan.scores is None for plan in executor.plans)
    assert (turn.output_logprobs, turn.input_scores, turn.input_logprobs) == ([], [], ())
    assert not engine.batch.scoring


def test_memory_for_counts_is_taken_only_by_rows_that_need_it_and_reused(start: Start) -> None:
    engine = start()
    for i in range(6):
        engine.sessions.open(f"s{i}")
        engine.turns.submit(f"s{i}", text(3), TurnParams(max_new_tokens=3, sampling=REPEATING if i % 2 else PLAIN))
    play(engine)
    assert 1 <= counted(executor_of(engine)) <= 4
    for i in range(4):
        engine.turns.submit(f"s{i}", text(3), TurnParams(max_new_tokens=3))
    play(engine)
    assert executor_of(engine)._options.plain(ROWS)


def test_scores_are_refused_if_the_input_was_computed_without_them(start: Start) -> None:
    engine = start()
    engine.sessions.open("s")
    draft = engine.turns.draft("s", text(9))
    play(engine)
    with pytest.raises(InvalidRequest, match="was a draft"):
        engine.turns.submit("s", text(9), TurnParams(input_logprobs=0))
    assert draft.state is TurnState.DRAFTING
    engine.turns.submit("s", text(9), TurnParams(max_new_tokens=2, logprobs=0))
    play(engine)
    with pytest.raises(InvalidRequest, match="no input"):
        engine.turns.regenerate("s", TurnParams(input_logprobs=0))


@pytest.mark.parametrize("field", ["allowed_ids", "logprob_ids"])
def test_token_ids_beyond_the_vocabulary_are_refused(start: Start, field: str) -> None:
    engine = start()
    engine.sessions.open("s")
    given = turn_params({field: [3, VOCAB], "logprobs": 0})  # type: ignore[misc]
    with pytest.raises(InvalidRequest, match=f"{field} has {VOCAB}; allowed: below {VOCAB}") as refused:
        engine.turns.submit("s", text(3), given)
    assert refused.value.param == field


def test_a_bias_for_a_token_that_does_not_exist_is_refused(start: Start) -> None:
    engine = start()
    engine.sessions.open("s")
    with pytest.raises(InvalidRequest, match="logit_bias has 101; allowed: below 101"):
        engine.turns.submit("s", text(3), TurnParams(sampling=Sampling(logit_bias=((VOCAB, 1.0),))))


@every_mix
@every_overlap
def test_each_input_token_is_scored_once_on_every_memory_kind_despite_recomputation(
    mix: tuple[Kind, ...], overlap: int
) -> None:
    stage = Stage(mix, overlap=overlap)
    history = list(stage.committed().history)
    given = [continuation(history, 1)[0], *count_from(50, 24)]
    turn = stage.say("s", given, 9, input_logprobs=1, logprobs=1)
    for enough in (lambda: turn.input_scores, lambda: len(turn.output) == 3):
        stage.until(enough)
        stage.engine.pressure.preempt(turn)
    stage.play()
    scores = [entry for entry in turn.input_logprobs if entry is not None]
    assert [entry.token for entry in scores] == given
    likeliest = [continuation([*history, *given[:i]], 1)[0] for i in range(len(given))]
    assert [entry.top for entry in scores] == [(Candidate(token, 0.0),) for token in likeliest]
    assert [entry.logprob == 0 for entry in scores] == [a == b for a, b in zip(given, likeliest, strict=True)]
    assert turn.output_logprobs == [TokenLogprob(token, 0.0, (Candidate(token, 0.0),)) for token in turn.output]
    assert not stage.engine.batch.scoring


class Numbers:
    """A text stream in which every token is its number and a blank; a stop string is searched at once."""

    def __init__(self, stop: tuple[str, ...], min_tokens: int, include_stop: bool, *_: object) -> None:
        self.stop: str | None = None
        self.delivered_tokens = 0
        self._stop, self._min_tokens = stop, min_tokens

    def push(self, token: int) -> bool:
        self.delivered_tokens += 1
        if self.delivered_tokens > self._min_tokens and f"{token} " in self._stop:
            self.stop = f"{token} "
        return self.stop is not None

    def finish(self) -> None:
        pass

    def take_text(self) -> str:
        return ""


@every_overlap
def test_the_result_names_the_stop_string_and_no_stop_string_ends_a_turn_too_early(
    model: LlamaForCausalLM, start: Start, overlap: int
) -> None:
    engine = start(overlap=overlap, text=Numbers)
    expected = said(model, text(8), TurnParams(max_new_tokens=9, sampling=BIASED))
    stop = tuple(f"{token} " for token in dict.fromkeys(expected))
    for least in (0, 4):
        engine.sessions.open(f"s{least}")
        params = TurnParams(max_new_tokens=9, sampling=BIASED, stop=stop, min_new_tokens=least)
        turn = engine.turns.submit(f"s{least}", text(8), params)
        play(engine)
        assert outputs(turn) == expected[: least + 1]
        assert turn.result is not None
        assert turn.result.stop == f"{expected[least]} "
