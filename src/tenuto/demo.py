"""The demonstration: sessions at work on a real model, every figure measured while you watch."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tenuto.api import Engine, Session, TurnStream
from tenuto.base.errors import ContextExceeded

SYSTEM = "You are a friendly guide. Answer in one or two short sentences."
TALKS = {
    "tea": [
        "Hello! What is the best way to make green tea?",
        "How hot should the water be?",
        "And how long should the leaves stay in it?",
        "Can I use the same leaves again?",
        "What goes well with it in the afternoon?",
        "Is there a kind with less caffeine?",
        "How should I store the leaves?",
        "Please sum up your advice in a short list.",
    ],
    "trip": [
        "I want to see Italy in a week. Where should I begin?",
        "What should I not miss there?",
        "How do I get from there to Florence?",
        "Where can I eat well and cheaply?",
        "Which museum is worth a whole day?",
        "I also like the sea. Which coast is close?",
        "What is the weather like in May?",
        "Please name the three cities for my notes.",
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


@dataclass(frozen=True, slots=True)
class Cost:
    """What turns asked at the same time cost, on average: tokens of their prompts that had to be computed, and seconds
    to the first token."""

    computed: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of every session, in averages: context and new input in tokens, and what it cost both ways."""

    context: float
    new: float
    held: Cost
    resent: Cost


def run_demo(model: str = "smollm2", device: str = "cpu", console: Console | None = None) -> None:
    """Show what sessions are good for. Raises what the interface raises if the model cannot be used."""
    show = Demo(console or Console(highlight=False), time.perf_counter())
    show.out.print(f"Loading {model} ...")
    with Engine(model, device=device, context_length=CONTEXT) as engine:
        sessions = {name: engine.session(name, system=SYSTEM) for name in TALKS}
        show.turns(engine, sessions)
        show.barge_in(sessions["tea"])
        show.fork(engine, sessions["trip"])
        show.rewind(sessions["garden"])
        show.refusal(sessions["garden"])
        show.audit(engine)


class Demo:
    """The parts of the demonstration, in the order they are shown."""

    def __init__(self, out: Console, started: float) -> None:
        self.out = out
        self._started = started

    def turns(self, engine: Engine, sessions: dict[str, Session]) -> None:
        """All sessions take their turns at the same time; then the same prompts are resent without a session."""
        self._title(f"{len(sessions)} sessions at once, {len(TALKS['tea'])} turns each")
        rounds = []
        for number, questions in enumerate(zip(*TALKS.values(), strict=True)):
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
            new = _mean([n - b for n, b in zip(prompts, before, strict=True)])
            rounds.append(Round(_mean(prompts), new, _cost(streams), _cost(again)))
        self._table(rounds)

    def _table(self, rounds: list[Round]) -> None:
        table = Table(title="means over the sessions; computed: tokens of the prompt", title_justify="left")
        for name in ("turn", "context", "new", "computed", "first token", "resent: computed", "first token", "ratio"):
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
                f"{one.resent.seconds / one.held.seconds:.1f}x",
            )
        self.out.print(table)

    def barge_in(self, session: Session) -> None:
        """Interrupt an answer, keep what was heard, and go on."""
        self._title("Barge-in: an answer is interrupted; what was heard stays, and is all the model remembers")
        turn = session.chat("Tell me the history of tea, from the beginning.", max_new_tokens=200)
        for _ in zip(range(12), turn, strict=False):
            pass
        result = turn.abort(keep="delivered")
        self._said(session.id, "Tell me the history of tea ...", turn.text + " --")
        after = session.chat("Sorry, go on please.", max_new_tokens=ANSWER_TOKENS)
        after.result()
        self._said(session.id, "Sorry, go on please.", after.text)
        self.out.print(f"{result.kept} of {result.usage.generated} tokens kept; the next turn {_spent(after)}.")

    def fork(self, engine: Engine, session: Session) -> None:
        """Two futures of one past."""
        self._title("Fork: one past, two futures, at once")
        questions = ("Now plan it for a family with children.", "Now plan it for a student with no money.")
        forks = [session.fork() for _ in questions]
        turns = [f.chat(q, max_new_tokens=ANSWER_TOKENS) for f, q in zip(forks, questions, strict=True)]
        for question, turn in zip(questions, turns, strict=True):
            turn.result()
            self._said("fork", question, turn.text)
        shared = sum(pool.by_holder.get("shared", 0) for pool in engine.audit().pools)
        context = turns[0].result().usage.prompt
        self.out.print(f"Of a context of {context} tokens, each fork {_spent(turns[0])}; {shared} pages are shared.")

    def rewind(self, session: Session) -> None:
        """Take turns back, and say something else."""
        self._title("Rewind: turns are taken back")
        before, after = session.info, session.rewind(turn=3)
        turn = session.chat("And strawberries?", max_new_tokens=ANSWER_TOKENS)
        turn.result()
        self._said(session.id, "And strawberries?", turn.text)
        self.out.print(
            f"From {before.turns} turns and {before.tokens} tokens back to {after.turns} and {after.tokens}; "
            f"the next turn {_spent(turn)}."
        )

    def refusal(self, session: Session) -> None:
        """A turn that cannot fit is refused before it changes anything."""
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
        """Where all memory is."""
        self._title(f"The auditor, after {time.perf_counter() - self._started:.0f} seconds")
        self.out.print(str(engine.audit()))

    def _title(self, text: str) -> None:
        self.out.print(f"\n{text}", style="bold")

    def _said(self, name: str, question: str, answer: str) -> None:
        """One exchange, on one line each."""
        for speaker, text in ((name, question), ("model", answer)):
            self.out.print(f"{speaker:>7}: {' '.join(text.split())}", markup=False, no_wrap=True, overflow="ellipsis")


def _mean(values: list[int] | list[float]) -> float:
    return sum(values) / len(values)


def _cost(turns: list[TurnStream]) -> Cost:
    usages = [turn.result().usage for turn in turns]
    seconds = [turn.time_to_first_token or 0.0 for turn in turns]
    return Cost(_mean([usage.prompt - usage.cached for usage in usages]), _mean(seconds))


def _spent(turn: TurnStream) -> str:
    usage = turn.result().usage
    return (
        f"computed {usage.prompt - usage.cached} tokens before its first, after {turn.time_to_first_token or 0.0:.2f} s"
    )
