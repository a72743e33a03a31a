"""The demonstration: sessions at work on a real model, with every figure measured live."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tenuto.api import Engine
from tenuto.base.errors import ConfigError, ContextExceeded, Disconnected
from tenuto.base.views import SHARED
from tenuto.client import Session, TurnStream, connect

SYSTEM = "You are a helpful assistant. Answer in one sentence."
QUESTIONS = {
    "tea": [
        "What is the best way to make green tea?",
        "How hot should the water be?",
        "And how long should the leaves stay in it?",
        "Can I use the same leaves again?",
        "What goes well with it in the afternoon?",
        "Is there a kind with less caffeine?",
        "How should I store the leaves?",
        "Please sum up your advice.",
    ],
    "world": [
        "Name the capital of France.",
        "And of Italy?",
        "Which river runs through Paris?",
        "What is the highest mountain on Earth?",
        "Which ocean is the largest?",
        "Where do penguins live?",
        "What is the largest desert?",
        "What is the capital of Japan?",
    ],
    "garden": [
        "I have a small balcony. Which vegetables can I grow?",
        "When should I plant tomatoes?",
        "How often do they need water?",
        "The leaves turn yellow. What could it be?",
        "Which herbs grow well beside them?",
        "Do I need to feed the plants?",
        "How do I keep insects away without poison?",
        "What should I do before winter comes?",
    ],
}
ANSWER_TOKENS = 20
CONTEXT = 2048
LONG = 1500
"""Minimum number of tokens of a long session."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The average cost of turns that ran at the same time: computed prompt tokens, and seconds to the first token."""

    computed: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Round:
    """Averages over one turn of every session: context and new input in tokens, and the costs with sessions (`held`)
    and with whole prompts (`resent`)."""

    context: float
    new: float
    held: Cost
    resent: Cost


def run_demo(
    model: str = "smollm2", device: str = "cpu", console: Console | None = None, *, keep: bool = False
) -> None:
    """Runs the demonstration; with `keep`, its last server goes on until Ctrl-C. Raises the errors of `Engine` if the
    model cannot be used."""
    show = Demo(console or Console(highlight=False, soft_wrap=True), time.perf_counter())
    show.out.print(f"Loading {model} ...")
    # Without the prefix cache: resent prompts would otherwise find the sessions' state in memory.
    with Engine(model, device=device, context_length=CONTEXT, prefix_cache=False) as engine:
        engine.generate("Once upon a time", max_new_tokens=1).result()  # a warm-up for both ways
        sessions = {name: engine.session(name, system=SYSTEM) for name in QUESTIONS}
        show.turns(engine, sessions)
        show.barge_in(sessions["tea"])
        show.fork(engine, sessions["world"])
        show.rewind(sessions["garden"])
        show.refusal(sessions["garden"])
        show.audit(engine)
    with tempfile.TemporaryDirectory() as directory:
        show.killed_server(model, device, Path(directory) / "journal")
        show.restored_session(model, device, Path(directory), keep=keep)


class Demo:
    """The parts of the demonstration, in the order they are shown."""

    def __init__(self, out: Console, started: float) -> None:
        self.out = out
        self._started = started

    def turns(self, engine: Engine, sessions: dict[str, Session]) -> None:
        """Runs the turns of all sessions at the same time, then resends the same prompts without a session."""
        self._title(f"{len(sessions)} sessions at once, {len(QUESTIONS['tea'])} turns each")
        rounds, same = [], 0
        for number, questions in enumerate(zip(*QUESTIONS.values(), strict=True)):
            before = [session.info.tokens for session in sessions.values()]
            streams = [
                session.chat(question, max_new_tokens=ANSWER_TOKENS)
                for session, question in zip(sessions.values(), questions, strict=True)
            ]
            prompts = [stream.result().usage.prompt for stream in streams]
            speaker = list(sessions)[number % len(sessions)]
            self._said(speaker, questions[number % len(sessions)], streams[number % len(sessions)].text)
            histories = [s.history[:n] for s, n in zip(sessions.values(), prompts, strict=True)]
            again = [engine.generate(history, max_new_tokens=1) for history in histories]
            costs = _cost(streams), _cost(again)  # which waits for their ends
            same += sum(a.token_ids == b.token_ids[:1] for a, b in zip(again, streams, strict=True))
            new = _mean([n - b for n, b in zip(prompts, before, strict=True)])
            rounds.append(Round(_mean(prompts), new, *costs))
        self._table(rounds)
        self.out.print(f"The first token was the same both ways in {same} of {len(rounds) * len(sessions)} turns.")

    def _table(self, rounds: list[Round]) -> None:
        self.out.print("\nAverages. Left: turns on sessions. Right: the same prompts resent whole, nothing cached.")
        table = Table(box=SIMPLE_HEAD, header_style="")
        for name in ("turn", "context", "new", "computed", "first token", "resent", "first token", "ratio"):
            table.add_column(name, justify="right")
        for number, one in enumerate(rounds, 1):
            table.add_row(
                str(number),
                f"{one.context:.0f}",
                f"{one.new:.0f}",
                f"{one.held.computed:.0f}",
                f"{one.held.seconds:.2f} s",
                f"{one.resent.computed:.0f}",
                f"{one.resent.seconds:.2f} s",
                f"{one.resent.seconds / one.held.seconds:.1f}",
            )
        self.out.print(table)

    def barge_in(self, session: Session) -> None:
        """Interrupts an answer, keeps the part that was heard, and continues."""
        self._title("Barge-in: an answer is interrupted, and the session keeps the part that was heard")
        turn = session.chat("Tell me a long story about tea.", max_new_tokens=200)
        for _ in zip(range(12), turn, strict=False):
            pass
        result = turn.abort(keep="delivered")
        self._said(session.id, "Tell me a long story about tea.", turn.text + " --")
        after = self._answered(session, "Sorry, go on please.")
        self.out.print(f"{result.kept} of {result.usage.generated} tokens kept; the next turn {_spent(after)}.")

    def fork(self, engine: Engine, session: Session) -> None:
        """Continues one session in two ways."""
        self._title("Fork: one past, two futures, at once")
        questions = ("What is the capital of Spain?", "What is the largest animal on Earth?")
        forks = [session.fork() for _ in questions]
        turns = [f.chat(q, max_new_tokens=ANSWER_TOKENS) for f, q in zip(forks, questions, strict=True)]
        for question, turn in zip(questions, turns, strict=True):
            turn.result()
            self._said("fork", question, turn.text)
        shared = sum(pool.by_holder.get(SHARED, 0) for pool in engine.audit().pools)
        context = turns[0].result().usage.prompt
        self.out.print(f"Of a context of {context} tokens, each fork {_spent(turns[0])}; {shared} pages are shared.")

    def rewind(self, session: Session) -> None:
        """Takes turns back and continues differently."""
        self._title("Rewind: turns are taken back")
        before, after = session.info, session.rewind(turn=3)
        turn = self._answered(session, "How do I grow carrots?")
        self.out.print(
            f"From {before.turns} turns and {before.tokens} tokens back to {after.turns} and {after.tokens}; "
            f"the next turn {_spent(turn)}."
        )

    def refusal(self, session: Session) -> None:
        """Shows that a turn that cannot fit is refused before it changes anything."""
        self._title("A turn that does not fit is refused, and changes nothing")
        before = session.info
        try:
            session.chat("and then " * CONTEXT)
        except ContextExceeded as error:
            self.out.print(f"{error.code} (HTTP {error.status}): {error}")
        same = "the same" if session.info == before else "NOT the same"
        self.out.print(
            f"The session is {same} as before: version {session.info.version}, {session.info.tokens} tokens."
        )

    def audit(self, engine: Engine) -> None:
        """Prints the auditor's account of all memory."""
        self._title(f"The auditor, after {time.perf_counter() - self._started:.0f} seconds")
        self.out.print(str(engine.audit()))

    def killed_server(self, model: str, device: str, journal: Path) -> None:
        """Kills a server in the middle of an answer, restarts it with its journal, and continues the session."""
        self._title("A server is killed in the middle of an answer, restarts with its journal, and continues")
        story = "Tell me a long story about tea."
        with _served(model, device, journal) as (url, server), connect(url) as engine:
            session = engine.session("tea", system=SYSTEM)
            self._answered(session, QUESTIONS["tea"][0])
            before = session.history
            turn = session.chat(story, max_new_tokens=1000, ignore_eos=True)
            for _ in zip(range(12), turn, strict=False):
                pass
            _kill(server)
            with suppress(Disconnected):
                turn.result()
            self._said("tea", story, turn.text + " -- kill -9")
        began = time.perf_counter()
        with _served(model, device, journal) as (url, _), connect(url) as engine:
            session = engine.attach("tea")
            same = "the same" if session.history == before else "NOT the same"
            self.out.print(
                f"It is back after {time.perf_counter() - began:.1f} s. The session has {session.info.tokens} tokens, "
                f"{same} as before the story, which has left no trace."
            )
            after = self._answered(session, QUESTIONS["tea"][1])
            self.out.print(f"The first turn {_spent(after)}: its history was computed again.")
            self.out.print(str(engine.audit()))

    def restored_session(self, model: str, device: str, directory: Path, *, keep: bool) -> None:
        """Restarts a server and continues a session from its state on disk, and a copy of it from its tokens."""
        self._title("A stopped server restarts: a session is restored from disk, and a copy of it is computed again")
        kept = ("--disk-tier", str(directory / "tier"), "--no-prefix-cache")
        question = "What is this about?"
        with _served(model, device, directory / "other", *kept) as (url, server), connect(url) as engine:
            session = engine.session("long", system=SYSTEM)
            while session.info.tokens < LONG:
                session.append([{"role": "user", "content": " ".join(QUESTIONS["garden"])}])
            server.terminate()
            server.wait()
        with _served(model, device, directory / "other", *kept) as (url, _), connect(url) as engine:
            session = engine.attach("long")
            copy = engine.import_session(session.export(), session_id="copy")
            for name, each in (("restored", session), ("recomputed", copy)):
                turn = each.chat(question, max_new_tokens=ANSWER_TOKENS)
                turn.result()
                self.out.print(f"{name:>10}: of a context of {turn.result().usage.prompt} tokens it {_spent(turn)}.")
                said = turn.text
            self._said("long", question, said)
            self.out.print(str(engine.audit()))
            self._map(url, keep=keep)

    def _map(self, url: str, *, keep: bool) -> None:
        """Prints where the map of the last server is or, unless it is kept, how to see one."""
        self._title("See it: who holds which memory, in a browser")
        if not keep:
            self.out.print("KEEP=1 make demo, or tenuto demo --keep, leaves this server running and shows it at /map.")
            return
        self.out.print(f"{url}/map shows this server's sessions; {url}/ talks to it. Ctrl-C ends both.")
        with suppress(KeyboardInterrupt):
            threading.Event().wait()

    def _title(self, text: str) -> None:
        self.out.print(f"\n{text}", style="bold")

    def _answered(self, session: Session, question: str) -> TurnStream:
        """Asks a question, waits for the end of the answer, and prints both. Returns the turn."""
        turn = session.chat(question, max_new_tokens=ANSWER_TOKENS)
        turn.result()
        self._said(session.id, question, turn.text)
        return turn

    def _said(self, name: str, question: str, answer: str) -> None:
        """Prints a question and its answer, on one line each."""
        for speaker, text in ((name, question), ("model", answer)):
            self.out.print(f"{speaker:>7}: {' '.join(text.split())}", markup=False, no_wrap=True, overflow="ellipsis")


@contextmanager
def _served(model: str, device: str, journal: Path, *more: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Runs a server with a journal and `more` options; gives its address and process. Raises `ConfigError` if it does
    not start."""
    command = [sys.executable, "-c", "from tenuto.cli import main; main()", "serve", "--port", "0"]
    options = ["--model", model, "--device", device, "--context-length", str(CONTEXT), "--journal", str(journal)]
    with subprocess.Popen(  # noqa: S603 - our own command
        [*command, *options, *more, "--log-level", "error"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its own process group, so that `_kill` also ends its engine process
    ) as server:
        try:
            assert server.stdout is not None
            said = []
            for line in server.stdout:
                said.append(line)
                if found := re.match(r"listening +(\S+)", line):
                    yield found[1], server
                    return
            raise ConfigError(f"the server did not start: {''.join(said)}")
        finally:
            _kill(server)


def _kill(server: subprocess.Popen[str]) -> None:
    """Kills the server's processes with SIGKILL, unless it has ended."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _mean(values: list[int] | list[float]) -> float:
    return sum(values) / len(values)


def _cost(turns: list[TurnStream]) -> Cost:
    """Returns the average cost of the turns, once all have ended."""
    usages = [turn.result().usage for turn in turns]
    seconds = [turn.time_to_first_token or 0.0 for turn in turns]
    return Cost(_mean([usage.prompt - usage.cached for usage in usages]), _mean(seconds))


def _spent(turn: TurnStream) -> str:
    usage = turn.result().usage
    return (
        f"computed {usage.prompt - usage.cached} tokens before its first, after {turn.time_to_first_token or 0.0:.2f} s"
    )
