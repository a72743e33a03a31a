"""Keeps users' text distinguishable from markup while a chat template mixes the two."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tenuto.base.errors import InvalidRequest
from tenuto.text.blanks import Before
from tenuto.text.bounds import WINDOW
from tenuto.text.room import Room
from tenuto.text.tokenizer import Tokenizer

_PRIVATE = re.compile("[\U000f0000-\U000ffffd]")


class Markup:
    """The texts of a tokenizer's control tokens, which must not act as markup in users' text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        texts = sorted(tokenizer.control_ids)
        either = "|".join(map(re.escape, texts))
        self.starts = re.compile(f"(?={either})" if either else r"(?!)")
        self.reach = max(map(len, texts), default=1)
        self.first_letters = sorted({text[0] for text in texts})
        self._heads = tuple({text[:cut] for text in texts for cut in range(1, len(text))})
        self._tails = tuple({text[cut:] for text in texts for cut in range(1, len(text))})

    def half_written(self, before: str, after: str) -> bool:
        """Whether `before` ends, or `after` starts, with part of a control token. A user's text between the two could
        complete it."""
        return before.endswith(self._heads) or after.startswith(self._tails)


class Guard:
    """The stand-ins of one rendering: characters of Unicode's private use area that occur in none of its texts.

    Where a user's text spells a control token, a stand-in replaces the first character before the template sees it. So
    control tokens in the output are the template's own, even if the template trims, splits or repeats the text. The
    original characters are restored when the text between control tokens is encoded.
    """

    def __init__(self, markup: Markup, texts: Iterable[str]) -> None:
        """`texts`: everything that enters the rendering, i.e. the template's source and the messages. Raises
        `InvalidRequest` if they leave too few private characters unused."""
        self._markup = markup
        used = {letter for text in texts for letter in _private_letters(text)}
        unused = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        try:
            self.mark, self.filler, self.probe = next(unused), next(unused), next(unused)
            self._stand_ins = {letter: next(unused) for letter in markup.first_letters}
        except StopIteration:
            raise InvalidRequest("messages use all of Unicode's private use plane 15; allowed: a part of it") from None

    def protect(self, text: str) -> str:
        """Returns `text` with stand-ins, for the template."""
        size = WINDOW + self._markup.reach - 1
        if not any(self._markup.starts.search(text, at, at + size) for at in range(0, len(text), WINDOW)):
            return text
        return "".join(self._protected(text, at) for at in range(0, len(text), WINDOW))

    def _protected(self, text: str, at: int) -> str:
        """Returns the window of `text` that starts at `at`, with stand-ins."""
        pieces, done, end = [], at, min(at + WINDOW, len(text))
        for match in self._markup.starts.finditer(text, at, end + self._markup.reach - 1):
            start = match.start()
            if start >= end:
                break
            pieces += [text[done:start], self._stand_ins[text[start]]]
            done = start + 1
        return "".join([*pieces, text[done:end]])

    def encode(self, rendered: str, room: Room | None = None, before: Before = Before.NOTHING) -> list[int]:
        """Returns the tokens of the rendered text, given what stands `before` it. Raises `ContextExceeded`, without
        encoding, if the text certainly does not fit into `room`."""
        tokenizer = self._markup.tokenizer
        if room is not None:
            room.require(tokenizer.least_tokens(rendered, self._added_bytes(rendered)))
        return tokenizer.encode(rendered, special=True, before=before, restored=self._restored)

    def _restored(self, text: str) -> str:
        for letter, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, letter)
        return text

    def _added_bytes(self, text: str) -> int:
        """Returns the number of UTF-8 bytes that stand-ins add to `text`."""
        return sum(
            text.count(stand_in) * (len(stand_in.encode()) - len(letter.encode()))
            for letter, stand_in in self._stand_ins.items()
        )


def _private_letters(text: str) -> set[str]:
    if text.isascii():
        return set()
    return {letter for at in range(0, len(text), WINDOW) for letter in _PRIVATE.findall(text, at, at + WINDOW)}
