"""Keeps what users write apart from markup while a template mixes the two."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tenuto.base.errors import InvalidRequest
from tenuto.text.tokenizer import Tokenizer

_PRIVATE = re.compile("[\U000f0000-\U000ffffd]")


class Markup:
    """The control tokens of a tokenizer, as the strings that must not be found in what users write."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        texts = sorted(tokenizer.control_texts)
        either = "|".join(map(re.escape, texts))
        self.starts = re.compile(f"(?={either})" if either else r"(?!)")
        self.first_letters = sorted({text[0] for text in texts})
        self._heads = tuple({text[:cut] for text in texts for cut in range(1, len(text))})
        self._tails = tuple({text[cut:] for text in texts for cut in range(1, len(text))})

    def half_written(self, before: str, after: str) -> bool:
        """Whether `before` ends, or `after` starts, inside the text of a control token, so that what is put between
        them could complete it."""
        return before.endswith(self._heads) or after.startswith(self._tails)


class Guard:
    """One rendering's stand-ins: letters of Unicode's private use area that occur in none of its texts.

    Where a user's text spells a control token, its first letter is exchanged for a stand-in before the template sees
    it. So whatever the template does with the text (trim, split, repeat), control tokens in the output are the
    template's own. The letters come back when the text between them is encoded.
    """

    def __init__(self, markup: Markup, texts: Iterable[str]) -> None:
        """`texts` are all that goes into the rendering: the template's source and the messages. Raises
        `InvalidRequest` if they leave no private letter unused."""
        self._markup = markup
        used = {letter for text in texts for letter in _PRIVATE.findall(text)}
        unused = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        try:
            self.mark, self.filler = next(unused), next(unused)
            self._stand_ins = {letter: next(unused) for letter in markup.first_letters}
        except StopIteration:
            raise InvalidRequest("messages use all of Unicode's private use plane 15; allowed: a part of it") from None
        self._letters = str.maketrans({stand_in: letter for letter, stand_in in self._stand_ins.items()})

    def protect(self, text: str) -> str:
        """`text` for the template."""
        pieces, done = [], 0
        for match in self._markup.starts.finditer(text):
            start = match.start()
            pieces += [text[done:start], self._stand_ins[text[start]]]
            done = start + 1
        return "".join([*pieces, text[done:]])

    def encode(self, rendered: str) -> list[int]:
        """The tokens of what the template made."""
        tokenizer = self._markup.tokenizer
        ids: list[int] = []
        for part in tokenizer.split_markup(rendered):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(tokenizer.encode(part.translate(self._letters)))
        return ids
