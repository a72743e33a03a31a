"""The terminal of a chat: lines broken at words, and keys that do not show in the middle of an answer."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.cells import cell_len

_PIECES = re.compile(r"\n|[^\S\n]+|[!-\u02ff]+|.")
"""A line break, blanks, a part of a word in Latin letters, or one other character."""


class WordWrap:
    """Breaks lines at words, in text that arrives in pieces. `width`: of a line, in cells. A word is held back until it
    is complete, unless it is wider than a line."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._blanks = ""  # shown before the next word, unless that begins a line
        self._word = ""
        self._open = False  # whether what was shown last is the beginning of a word wider than a line

    def feed(self, text: str) -> str:
        """Returns what can be shown now."""
        shown = ""
        for piece in _PIECES.findall(text):
            wide = len(piece) == 1 and cell_len(piece) > 1  # a character of a script that breaks anywhere
            if self._open and not (wide or piece.isspace()):
                shown += piece
                self._column += cell_len(piece)
                continue
            self._open = False
            if piece == "\n":
                shown += self.rest() + piece
                self._column, self._blanks = 0, ""
            elif piece.isspace():
                shown += self.rest()
                self._blanks += piece.expandtabs(4)
            elif wide:
                shown += self.rest()
                self._word = piece
                shown += self.rest()
            else:
                self._word += piece
                if cell_len(self._word) >= self._width:
                    shown += self.rest()
                    self._open = True
        return shown

    def rest(self) -> str:
        """Returns the word held back, on a new line if it does not fit."""
        if not self._word:
            return ""
        size = cell_len(self._word)
        fits = self._column + len(self._blanks) + size <= self._width
        before = self._blanks if fits or not self._column else "\n"
        self._column = (self._column + len(before) if before != "\n" else 0) + size
        word, self._word, self._blanks = self._word, "", ""
        return before + word


def wrap_for_terminal() -> WordWrap | None:
    """Returns a wrap for the width of the terminal, or `None` if stdout is not one."""
    return WordWrap(shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


@contextmanager
def without_echo() -> Iterator[None]:
    """Keeps keys typed inside the block from showing. They are the input of the next prompt."""
    if not sys.stdin.isatty():
        yield
        return
    import termios  # noqa: PLC0415 - some systems with other commands lack it

    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
