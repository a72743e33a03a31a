"""The blank that some tokenizers put before a text. We add it ourselves because the library cannot know whether a text
continues a history."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import tokenizers
from tokenizers import decoders, normalizers

from tenuto.text.alphabet import SPACE, replacing, steps


class Before(Enum):
    """The kind of content that precedes a text in its history."""

    NOTHING = "nothing"
    CONTROL = "control"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Blanks:
    """Settings of the leading blank: with `opens` it is put before the first text of a history, with `control` before a
    text that follows a control token, and with `once` only if the text does not begin with a blank already."""

    opens: bool = False
    control: bool = False
    once: bool = False

    def put(self, text: str, before: Before) -> str:
        """Returns `text`, with a leading blank where one belongs."""
        wanted = self.opens if before is Before.NOTHING else self.control and before is Before.CONTROL
        return f" {text}" if wanted and text and not (self.once and text.startswith((" ", SPACE))) else text


def taken_from(backend: tokenizers.Tokenizer) -> Blanks:
    """Moves the leading blank out of `backend` and returns its settings; `backend` then only replaces blanks with
    `SPACE` and back. In Llama 2's form the normalizer puts a blank before each text between control tokens. A
    pre-tokenizer of type Metaspace does so before each text or only before the first. Other backends are left
    unchanged."""
    found = [*steps(backend.normalizer, "normalizers"), *steps(backend.pre_tokenizer, "pretokenizers")]
    match found:
        case [{"type": "Prepend", "prepend": letter}, {"type": "Replace"} as replace] if letter == SPACE:
            blanks = Blanks(opens=True, control=True)
            if replace != replacing(" ", SPACE):
                return Blanks()
        case [{"type": "Metaspace", "replacement": letter, "split": False, "prepend_scheme": scheme}] if (
            letter == SPACE
        ):
            blanks = Blanks(opens=scheme != "never", control=scheme == "always", once=True)
        case _:
            return Blanks()
    written = [replacing(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    taken = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if steps(backend.decoder, "decoders") not in (written, [*written, taken]):
        return Blanks()
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return blanks
