"""Far more sessions of the default model than the device holds: every answer follows from the session's own history.

`python -m tests.numerics.test_many_sessions 1000` runs 1000 sessions; `--kernels avx512` selects other kernels.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from tenuto.base.clock import Clock, SystemClock
from tenuto.base.config import DEFAULT_MODEL, EngineConfig, cache_dir
from tenuto.base.options import TurnParams
from tenuto.engine.engine import Engine
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.memory.tiers.unit_files import UnitFiles
from tenuto.models.store import resolve
from tenuto.text.load import load_tokenizer
from tests.clock import ManualClock
from tests.exec.driver import Driver, logits_of
from tests.exec.kernels import allowed_behind
from tests.numerics.test_conversations import Comparison
from tests.present import present
from tests.tiered import parking_in

LICENCE = Path(__file__).parents[2] / "LICENSE"
PAGE, RUNNING = 16, 16
TURNS, INPUT, OUTPUT = 3, (8, 32), 8
LENGTH = TURNS * (INPUT[1] + OUTPUT)
"""Tokens of the longest session."""
AT_ONCE = 200
"""Turns submitted together."""


class ManySessions:
    """Sessions on an engine whose device memory holds `fit` of them and host memory half of the others; the rest is on
    disk. Each takes `TURNS` turns, in a different order every time."""

    def __init__(
        self, executor: ModelExecutor, text: list[int], sessions: int, fit: int, disk: UnitFiles, clock: Clock
    ) -> None:
        units = fit * -(-LENGTH // PAGE)
        config = EngineConfig(
            context_length=LENGTH + PAGE,
            max_running=RUNNING,
            max_sessions=sessions,
            token_budget=256,
            host_tier=sessions * LENGTH // PAGE // 2 * executor.unit_bytes(0),
            audit_every=0,
        )
        forward = executor.forward
        self.engine = Engine(
            executor,
            (units,),
            config,
            vocab_size=forward.config.vocab,
            eos_ids=forward.config.eos,
            clock=clock,
            random=Random(0),
            disk=disk,
        )
        self._text = text
        self._rng = Random(5)
        self.said: dict[str, tuple[list[int], list[int]]] = {str(number): ([], []) for number in range(sessions)}
        """Tokens of each session, and the positions of those it has generated."""
        self.computed = self.given = 0  # tokens

    def run(self) -> None:
        names = list(self.said)
        for name in names:
            self.engine.sessions.open(name)
        for _ in range(TURNS):
            self._rng.shuffle(names)
            for first in range(0, len(names), AT_ONCE):
                self._take_turns(names[first : first + AT_ONCE])
            self.engine.audit()

    def _take_turns(self, names: list[str]) -> None:
        params = TurnParams(max_new_tokens=OUTPUT, ignore_eos=True)
        asked = {}
        for name in names:
            start = self._rng.randrange(len(self._text) - INPUT[1])
            tokens = self._text[start : start + self._rng.randint(*INPUT)]
            asked[name] = tokens, self.engine.turns.submit(name, tokens, params)
        while not self.engine.idle:
            self.engine.step()
        for name, (tokens, turn) in asked.items():
            history, positions = self.said[name]
            usage = present(turn.result).usage
            assert usage.generated == OUTPUT
            self.given += usage.generated + len(tokens)
            self.computed += usage.computed
            history += tokens
            positions += range(len(history), len(history) + OUTPUT)
            history += turn.output
            assert self.engine.registry.get(name).history.tolist() == history

    def figures(self) -> dict[str, int]:
        parking = parking_in(self.engine)
        return {
            "restored": self.engine.restores.restored,
            "moved to host memory": parking.tiers.moved["host"],
            "moved to disk": parking.tiers.moved["disk"],
            "restores that failed": parking.recomputed.total(),
            "tokens generated and given": self.given,
            "tokens computed": self.computed,
        }

    def close(self) -> None:
        for name in self.said:
            self.engine.sessions.close(name)
        self.engine.idle_memory.finish()
        self.engine.step()  # ends the save that was under way
        tiers = parking_in(self.engine).tiers
        assert tiers.copies.host_used == tiers.copies.disk_used == 0
        self.engine.sessions.drop()
        self.engine.audit()


def compare_alone(executor: ModelExecutor, said: dict[str, tuple[list[int], list[int]]]) -> Comparison:
    """Compares generated tokens with the model's output when each session is computed alone, at once."""
    driver, comparison = Driver(executor, LENGTH // PAGE + 1, 1), Comparison()
    for tokens, positions in said.values():
        driver.lengths[0] = 0
        last = len(tokens) - positions[0] + 1  # logits from which the first of them was sampled, and later ones
        logits = logits_of(executor, driver.plan([(0, tokens, last)]))
        comparison.add(logits[torch.tensor(positions) - positions[0]], tuple(tokens), positions)
    return comparison


def text_of_licence() -> list[int]:
    return load_tokenizer(resolve(DEFAULT_MODEL, cache_dir()).path).encode(LICENCE.read_text(encoding="utf-8"))


def test_sessions_that_far_exceed_device_memory_answer_as_if_alone(tmp_path: Path) -> None:
    """On the kernels that a server would use here; `tests/test_snapshots.py` moves the state of every variant."""
    executor = load_executor(resolve(DEFAULT_MODEL, cache_dir()), ExecutorOptions(PAGE, cache=cache_dir()))
    with closing(executor), closing(UnitFiles(tmp_path, 10**9)) as disk:
        many = ManySessions(executor, text_of_licence(), 12, 2, disk, ManualClock())
        many.run()
        figures = many.figures()
        many.close()
        comparison = compare_alone(executor, many.said)
    assert figures["restored"] >= (TURNS - 1) * (12 - 2 * 2)
    assert figures["moved to disk"] > 0
    assert not figures["restores that failed"]
    assert all(behind < allowed_behind(executor.forward.description) for behind in comparison.behind), str(comparison)


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.numerics.test_many_sessions", description=__doc__)
    parser.add_argument("sessions", type=int)
    parser.add_argument("--fit", type=int, default=50, help="sessions that the device has memory for")
    parser.add_argument("--kernels", default="auto", help="kernels, as for tenuto serve")
    arguments = parser.parse_args()
    executor = load_executor(
        resolve(DEFAULT_MODEL, cache_dir()), ExecutorOptions(PAGE, kernels=arguments.kernels, cache=cache_dir())
    )
    with TemporaryDirectory() as directory, closing(executor), closing(UnitFiles(Path(directory), 10**11)) as disk:
        many = ManySessions(executor, text_of_licence(), arguments.sessions, arguments.fit, disk, SystemClock())
        began = time.monotonic()
        many.run()
        print(
            f"{arguments.sessions} sessions, {TURNS} turns each, in {time.monotonic() - began:.0f} s:", many.figures()
        )
        many.close()
        comparison = compare_alone(executor, many.said)
        print(f"{executor.forward.description}: {comparison}")
    assert all(behind < allowed_behind(executor.forward.description) for behind in comparison.behind)


if __name__ == "__main__":
    main()
