"""The real command line, run as by people and scripts."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

import tenuto
from tenuto.base.config import cache_dir

pty = pytest.importorskip("pty", reason="pseudo-terminals are a thing of Unix")

TENUTO = str(Path(sys.executable).parent / "tenuto")
CHAT = [TENUTO, "chat", "--context-length", "512"]
OWN_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Makes standard input the controlling terminal, so that Ctrl-C typed into it interrupts, even in a background job that
ignores it; then becomes the command."""


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    named = {"TENUTO_CACHE": str(cache_dir()), **os.environ}  # so that users without a home directory get no hint
    command = [TENUTO, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False, env=named)


class Terminal:
    """A command in a new terminal."""

    def __init__(self, command: list[str]) -> None:
        self._ours, theirs = os.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
        )
        os.close(theirs)
        self.shown = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Reads until the output after the last match matches, and consumes it."""
        match = self._read_until(pattern, seconds=120)
        if match is None:
            pytest.fail(f"no {pattern!r} in {self.shown!r}")
        return match

    def _read_until(self, pattern: str, seconds: float) -> re.Match[str] | None:
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, self.shown)) is None:
            if not select.select([self._ours], [], [], max(0, deadline - time.monotonic()))[0]:
                return None
            try:
                self.shown += os.read(self._ours, 4096).decode(errors="replace").replace("\r", "")
            except OSError:  # the other side is gone
                pytest.fail(f"it ended without {pattern!r}: {self.shown!r}")
        self.shown = self.shown[match.end() :]
        return match

    def interrupt(self, pattern: str) -> re.Match[str]:
        """Types Ctrl-C until the output matches: Python loses one that arrives just as a prompt begins to wait."""
        for _ in range(6):
            self.type("\x03")
            if match := self._read_until(pattern, 20):
                return match
        pytest.fail(f"no {pattern!r} in {self.shown!r}")

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def quit_by(self, key: str) -> int:
        """Types the key until the command ends, as `interrupt` does."""
        for _ in range(60):
            self.type(key)
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=2)
        pytest.fail(f"{key!r} does not end it: {self.shown!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


def test_help_shows_commands_and_examples_without_loading_a_model() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "\n    tenuto demo  " in done.stdout  # each example is on a separate line
    assert "\x1b" not in done.stdout
    assert "/fork" in run("chat", "--help").stdout
    code = "import sys, tenuto.cli; sys.exit(bool({'torch', 'numpy', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_the_packages() -> None:
    done = run("--version")
    assert re.fullmatch(r"tenuto \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.usefixtures("smollm2_path")
def test_errors_are_one_line_and_a_status() -> None:
    done = run("chat", "--model", "no/such/model")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"tenuto: there is no model 'no/such/model'; .*\n", done.stderr)
    done = run("chat", "--kernels", "torch", "--kv-cache-dtype", "int8")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"tenuto: kv_cache_dtype is 'int8', .*; allowed with plain PyTorch: auto\n", done.stderr)
    assert run("chat", "--nonsense").returncode == 2
    assert run("nonsense").returncode == 2


def test_pull_prints_where_the_model_is(smollm2_path: Path) -> None:
    done = run("pull")
    assert (done.returncode, done.stdout) == (0, f"smollm2 is ready: {smollm2_path}\n")


@pytest.mark.parametrize("home", [None, "/proc/self"], ids=["unset", "read-only"])
def test_without_a_home_it_works_in_a_temporary_directory(home: str | None, smollm2_path: Path, tmp_path: Path) -> None:
    private = tmp_path / f"tenuto-{os.getuid()}"
    private.mkdir(mode=0o700)
    (private / "models").symlink_to(smollm2_path.parent)
    elsewhere = {key: value for key, value in os.environ.items() if key not in ("HOME", "TENUTO_CACHE")}
    elsewhere |= {"TMPDIR": str(tmp_path)} | ({"HOME": home} if home else {"XDG_CACHE_HOME": "/proc/self/nowhere"})
    done = subprocess.run([TENUTO, "pull"], capture_output=True, text=True, env=elsewhere, check=False)
    assert (done.returncode, done.stdout) == (0, f"smollm2 is ready: {private / 'models' / smollm2_path.name}\n")
    assert done.stderr == f"{private} is temporary, without a home directory; set TENUTO_CACHE to another\n"


def test_without_a_compiler_it_says_so_and_uses_pytorch(smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(smollm2_path.parent)  # a cache without kernels
    bare = {**os.environ, "PATH": str(tmp_path), "TENUTO_CACHE": str(tmp_path)}
    done = subprocess.run(
        [*CHAT, "--max-new-tokens", "6"],
        input="Name the capital of France.\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=bare,
        check=False,
    )
    assert done.returncode == 0
    assert "Plain PyTorch computes: there is no C++ compiler" in done.stderr
    assert done.stdout.strip()


def test_a_script_of_lines_talks_to_sessions(smollm2_path: Path) -> None:
    lines = [
        "Name the capital of France.",
        "/fork",
        "And of Italy?",
        "/regenerate",
        "/sessions",
        "/switch 1",
        "/rewind",
        "/memory",
        "/help",
        "/quit",
        "never read",
    ]
    done = run(*CHAT[1:], "--max-new-tokens", "12", stdin="\n".join(lines))
    assert done.returncode == 0
    expected = ("Compiling kernels", "Plain PyTorch computes")
    assert all(line.startswith(expected) for line in done.stderr.splitlines()), done.stderr
    assert "Paris" in done.stdout.splitlines()[0]
    assert done.stdout.count("Rome") == 2  # once more, regenerated
    assert "session 2 is a fork of 1" in done.stdout
    assert re.search(r"\n  session 1: 1 turns.*\n\* session 2: 2 turns", done.stdout)
    assert "session 1: 0 turns, 0 tokens" in done.stdout
    assert "every unit accounted for" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_chat_with_a_journal_continues_where_another_ended(tmp_path: Path) -> None:
    chat = ["chat", "--model", "witness", "--max-new-tokens", "8"]
    lines = ["hello", "/fork", "and again", "/switch 1", "otherwise", "/switch 2", "/fork", "/rewind", "at last"]
    whole = run(*chat, stdin="\n".join(lines))
    assert whole.returncode == 0
    journal, parts = str(tmp_path / "journal"), ""
    for part in (lines[:3], lines[3:6], lines[6:8], lines[8:]):
        done = run(*chat, "--journal", journal, stdin="\n".join(part))
        assert done.returncode == 0
        parts += done.stdout
    assert re.sub(r" \d+ of them to be computed again,", "", parts) == whole.stdout
    assert re.fullmatch("continuing session 3: 1 turns, .* tokens, .*; /sessions lists all\n", done.stderr)
    last = run(*chat, "--journal", journal, stdin="/sessions")
    assert re.findall(r"(.) session (\d+): (\d+) turns", last.stdout) == [
        (" ", "1", "2"),
        (" ", "2", "2"),
        ("*", "3", "2"),
    ]


def test_a_killed_chat_has_all_its_finished_answers(tmp_path: Path) -> None:
    chat = ["chat", "--model", "witness:0.01", "--journal", str(tmp_path / "journal")]
    process = subprocess.Popen([TENUTO, *chat], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write("/fork\n")
        process.stdin.write("hello\n")  # its answer does not end
        process.stdin.flush()
        assert process.stdout.readline() == "session 2 is a fork of 1; this is 2\n"
        assert process.stdout.read(10)
        process.kill()
    again = run(*chat, stdin="/sessions")
    assert again.returncode == 0
    assert re.findall(r"(.) session (\d+): (\d+) turns", again.stdout) == [(" ", "1", "0"), ("*", "2", "0")]


def test_a_chat_opens_any_session_of_a_journal_and_numbers_its_forks_anew(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    with tenuto.Engine("witness", journal=journal) as engine:
        for name in ("zoo", "3", "10"):
            engine.session(name)
    done = run("chat", "--model", "witness", "--journal", journal, stdin="/fork\n/switch zoo\n/fork")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "session 11 is a fork of 10; this is 11")
    assert done.stdout.splitlines()[-1] == "session 12 is a fork of zoo; this is 12"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/rewind 3", "has 0 turns"),
        ("/nonsense", "/help lists"),
        ("/switch 7", "allowed: 1"),
        ("a" * 9000, "history and input have"),
    ],
)
def test_a_script_stops_at_its_first_error(line: str, complaint: str) -> None:
    done = run("chat", "--model", "witness", stdin=f"{line}\n/memory\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"tenuto: .*{complaint}.*\n", done.stderr)


def test_ctrl_c_is_a_barge_in_and_quits_at_the_prompt(smollm2_path: Path) -> None:
    with Terminal([*CHAT, "--system", "You tell long stories."]) as terminal:
        terminal.wait_for("1> ")
        terminal.type("word " * 600 + "\n")
        terminal.wait_for("error: history and input have")
        terminal.wait_for("1> ")
        terminal.type("Please tell me a very long story about the sea.\n")
        terminal.wait_for(r"sea\.\n.*?\w+ \w+ \w+ ")
        kept = int(terminal.interrupt(r"\[abort: kept (\d+) tokens")[1])
        assert kept > 2
        terminal.wait_for("1> ")
        terminal.type("/sessions\n")
        terminal.wait_for(r"\* session 1: 1 turns")
        terminal.wait_for("1> ")
        assert terminal.quit_by("\x03") == 0


def test_one_ctrl_c_at_the_prompt_keeps_the_sessions() -> None:
    with Terminal([TENUTO, "chat", "--model", "witness", "--max-new-tokens", "8"]) as terminal:
        terminal.wait_for("1> ")
        terminal.interrupt("Ctrl-C again leaves")
        terminal.wait_for("1> ")
        terminal.type("hello\n")
        terminal.wait_for(r"\[length: kept 8 tokens")
        terminal.wait_for("1> ")
        terminal.type("/switch\n")
        terminal.wait_for(r"\* session 1: 1 turns")


def test_lines_typed_during_an_answer_are_read_after_it() -> None:
    with Terminal([TENUTO, "chat", "--model", "witness:0.05", "--max-new-tokens", "40"]) as terminal:
        terminal.wait_for("1> ")
        terminal.type("hello\n")
        terminal.wait_for(r"hello\n\S*.")
        terminal.type("/sessions\n")
        answer = terminal.wait_for(r"(?s)(.*)\[length: kept 40 tokens")[1]
        assert "sessions" not in answer
        terminal.wait_for(r"\* session 1: 1 turns")


def test_an_answer_that_reaches_the_limit_goes_on_when_asked() -> None:
    with Terminal([TENUTO, "chat", "--model", "witness", "--max-new-tokens", "8"]) as terminal:
        terminal.wait_for("1> ")
        terminal.type("/continue\n")
        terminal.wait_for("error: /continue; allowed right after an answer that ended at --max-new-tokens")
        terminal.wait_for("1> ")
        terminal.type("hello\n")
        terminal.wait_for(r"\[length: kept 8 tokens")
        terminal.wait_for("/continue goes on")
        terminal.wait_for("1> ")
        terminal.type("/continue\n")
        terminal.wait_for(r"\[length: kept 8 tokens")


def test_ctrl_d_quits() -> None:
    with Terminal([TENUTO, "chat", "--model", "witness"]) as terminal:
        terminal.wait_for("1> ")
        assert terminal.quit_by("\x04") == 0
