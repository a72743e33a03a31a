"""The command `tenuto chat`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic

import typer
from rich.console import Console

from tenuto.api import Engine
from tenuto.base.errors import InvalidRequest, TenutoError
from tenuto.base.turns import EndReason
from tenuto.cli.terminal import without_echo, wrap_for_terminal
from tenuto.client import Session, SessionInfo, TurnOptions, TurnResult, TurnStream

HELP = """\
/fork          continue in a copy of this session; the original is unchanged
/rewind [n]    take back the last n turns (1)
/regenerate    answer the last message again
/continue      go on with an answer that ended at --max-new-tokens
/sessions      list the sessions
/switch [ID]   continue in another session; without an id, list them
/memory        account for every unit of memory
/help          show this list
/quit          leave, as Ctrl-D does, and Ctrl-C twice at the prompt\
"""

LATE_SECONDS = 1.0
"""A Ctrl-C this soon after an answer was meant for it, and came too late."""


def run_chat(engine: Engine, system: str | None, options: TurnOptions) -> None:
    """Runs the chat until the input ends. On a terminal, errors are shown and the chat continues; in a script, the
    first error is raised."""
    chat = Chat(engine, system, options)
    interactive = sys.stdin.isatty()
    if interactive:
        chat.say("/help lists the commands.")
    for line in read_lines(lambda: f"{chat.session.id}> ", prompted=interactive):
        try:
            if not chat.obey(line.strip()):
                return
        except TenutoError as error:
            if not interactive:
                raise
            typer.echo(f"error: {error}", err=True)
        except KeyboardInterrupt:  # it came too late for the answer
            if not interactive:
                raise
            typer.echo()


def read_lines(prompt: Callable[[], str], *, prompted: bool, clock: Callable[[], float] = monotonic) -> Iterator[str]:
    """Yields the lines typed, until the input ends or Ctrl-C is typed twice in a row. `prompted`: whether the input is
    a terminal."""
    if not prompted:
        yield from sys.stdin
        return
    with suppress(ImportError):  # some systems lack it; then there is no line editing
        import readline  # noqa: F401, PLC0415 - importing it changes `input`
    leaving, answered = False, -math.inf  # whether the last key was Ctrl-C, and when the last line was dealt with
    while True:
        try:
            line = input(prompt())
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
            if clock() - answered < LATE_SECONDS:
                continue
            if leaving:
                return
            leaving = True
            typer.echo("Ctrl-C again leaves the chat, as Ctrl-D does.", err=True)
            continue
        leaving = False
        yield line
        answered = clock()


class Chat:
    """A chat with several sessions, one of them current."""

    def __init__(self, engine: Engine, system: str | None, options: TurnOptions) -> None:
        self._engine = engine
        self._options = options
        self._notes = Console(stderr=True, highlight=False, markup=False)
        self._regenerated = 0
        self._cut_short = ""  # id of the session whose last answer ended at its limit
        self._sessions: dict[str, Session] = {}
        for info in sorted(engine.sessions(), key=lambda info: _sort_key(info.session_id)):  # sessions from the journal
            self._sessions[info.session_id] = engine.attach(info.session_id)
        if self._sessions:
            *_, self.session = self._sessions.values()
            typer.echo(f"continuing {_line(self.session.info)}; /sessions lists all", err=True)
        else:
            self._sessions["1"] = self.session = engine.session("1", system=system)
        self._commands: dict[str, Callable[[str], None]] = {
            "fork": self._fork,
            "rewind": self._rewind,
            "regenerate": self._regenerate,
            "continue": self._continue,
            "sessions": self._list,
            "switch": self._switch,
            "memory": self._memory,
            "help": self._help,
        }

    def obey(self, line: str) -> bool:
        """Handles one line. Returns False if it is /quit."""
        name, _, argument = line.removeprefix("/").partition(" ")
        if not line.startswith("/"):
            if line:
                self._answer(self.session.chat(line, **self._options))
        elif name == "quit":
            return False
        elif name in self._commands:
            self._commands[name](argument.strip())
        else:
            raise InvalidRequest(f"there is no command /{name}; allowed: the commands that /help lists")
        return True

    def say(self, note: str) -> None:
        """Prints a note, only on a terminal."""
        if self._notes.is_terminal:
            self._notes.print(note, style="dim")

    def _answer(self, turn: TurnStream) -> None:
        """Shows a turn's text as it arrives. Ctrl-C is a barge-in."""
        wrap = wrap_for_terminal()
        with without_echo():
            try:
                for piece in turn:
                    typer.echo(wrap.feed(piece) if wrap else piece, nl=False)
                result = turn.result()
            except KeyboardInterrupt:
                result = turn.abort(keep="delivered")
            typer.echo(wrap.rest() if wrap else "")
        self._cut_short = self.session.id if result.reason is EndReason.LENGTH else ""
        self.say(_summary(result, turn.time_to_first_token))
        if self._cut_short:
            self.say("/continue goes on.")

    def _fork(self, _argument: str) -> None:
        parent, (_, last, _) = self.session.id, max(map(_sort_key, self._sessions))
        child = self.session.fork(session_id=str(last + 1))
        self._sessions[child.id] = self.session = child
        typer.echo(f"session {child.id} is a fork of {parent}; this is {child.id}")

    def _rewind(self, argument: str) -> None:
        if argument and not argument.isdecimal():
            raise InvalidRequest(f"/rewind {argument}; allowed: a number of turns")
        turns, back = self.session.info.turns, int(argument or 1)
        if back > turns:
            raise InvalidRequest(f"/rewind {back}; session {self.session.id} has {turns} turns")
        typer.echo(_line(self.session.rewind(turn=turns - back)))
        self._cut_short = ""

    def _regenerate(self, _argument: str) -> None:
        self._regenerated += 1
        options = self._options.copy()
        options["seed"] = options.get("seed", 0) + self._regenerated  # another seed each time
        self._answer(self.session.regenerate(**options))

    def _continue(self, _argument: str) -> None:
        if self._cut_short != self.session.id:
            raise InvalidRequest("/continue; allowed right after an answer that ended at --max-new-tokens")
        self._answer(self.session.turn(**self._options))

    def _list(self, _argument: str) -> None:
        for info in self._engine.sessions():
            typer.echo(f"{'*' if info.session_id == self.session.id else ' '} {_line(info)}")

    def _switch(self, argument: str) -> None:
        if not argument:
            self._list("")
            return
        if argument not in self._sessions:
            raise InvalidRequest(f"/switch {argument}; allowed: {', '.join(self._sessions)}")
        self.session = self._sessions[argument]
        typer.echo(_line(self.session.info))

    def _memory(self, _argument: str) -> None:
        typer.echo(str(self._engine.audit()))

    def _help(self, _argument: str) -> None:
        typer.echo(HELP)


def _sort_key(session_id: str) -> tuple[bool, int, str]:
    """Returns a sort key: numbered sessions in order, after those that other programs named."""
    numbered = session_id.isdecimal()
    return numbered, int(session_id) if numbered else 0, session_id


def _line(info: SessionInfo) -> str:
    again = max(0, info.tokens - 1 - info.computed)
    tokens = f"{info.tokens} tokens" + (f", {again} of them to be computed again" if again else "")
    return f"session {info.session_id}: {info.turns} turns, {tokens}, room for {info.context_left} more"


def _summary(result: TurnResult, first: float | None) -> str:
    used = result.usage
    waited = f", first token after {first:.2f} s" if first is not None else ""
    return (
        f"[{result.reason.value}: kept {result.kept} tokens; context {used.prompt + result.kept}, "
        f"of the prompt {used.prompt - used.cached} tokens computed{waited}]"
    )
