"""The blank that some tokenizers put before a text. It is added here, and not by the library, which cannot know whether
a text goes on from what is already in a history."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import tokenizers
from tokenizers import decoders, normalizers

from tenuto.text.alphabet import SPACE, replacing, steps


class Before(Enum):
    """What stands before a text in its history."""

    NOTHING = "nothing"
    CONTROL = "control"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Blanks:
    """Where a blank is put before a text: where it `opens` a history, and after a `control` token. `once`: not where
    the text begins with one."""

    opens: bool = False
    control: bool = False
    once: bool = False

    def put(self, text: str, before: Before) -> str:
        """`text` with its blank, if it gets one."""
        wanted = self.opens if before is Before.NOTHING else self.control and before is Before.CONTROL
        return f" {text}" if wanted and text and not (self.once and text.startswith((" ", SPACE))) else text


def taken_from(backend: tokenizers.Tokenizer) -> Blanks:
    """What `backend` does with blanks, which it does no more afterwards: they are only replaced, there and back. As
    Llama 2 has it, the normalizer puts one before each text between control tokens; a pre-tokenizer of type Metaspace
    before each, or only before the first. The decoder takes it away again. Other backends stay as they are."""
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
