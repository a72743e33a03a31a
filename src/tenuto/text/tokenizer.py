"""The tokenizer: converts text to token ids and back, and keeps control tokens apart from text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import tokenizers

from tenuto.base.errors import InvalidRequest, ModelError
from tenuto.base.fill import FillTokens
from tenuto.text.alphabet import Alphabet, alphabet_of
from tenuto.text.blanks import Before, Blanks, taken_from
from tenuto.text.bounds import token_bound

LONG_TEXT = 2048
"""Texts of at least this many characters are encoded without holding the GIL, so that other threads can run."""


class Tokenizer:
    """A BPE tokenizer in which a token stands for the same bytes in every context.

    Control tokens (`<|im_end|>` and the like) steer the model. Text encodes to them only if the caller of `encode`
    declares it as markup. Added tokens that are not declared special are ordinary text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
        adds_bos: bool = False,
        end_id: int | None = None,
        fill: FillTokens | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        blanks: Blanks | None = None,
    ) -> None:
        """Takes over `backend` and configures it. `blanks` says where a blank goes before a text; by default
        `backend`'s own settings decide. Raises `ModelError` if `alphabet_of` does not support `backend`, or if plain
        text can encode to a control token."""
        self._blanks = blanks or taken_from(backend)
        alphabet = alphabet_of(backend)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # the library's name for: treat their text as ordinary text
        self._backend = backend
        self._bytes = _token_bytes(backend, alphabet)
        self._control = {i: t.content for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self.control_ids = {text: i for i, text in self._control.items()}
        """The control tokens, by their markup."""
        self._control_pattern = _control_pattern(backend)
        self.bos_id = bos_id
        """The beginning-of-text token, if the model has one."""
        self.eos_ids = eos_ids
        """Tokens that end an answer. Templates see the first as `eos_token`."""
        self.adds_bos = adds_bos
        """Whether a prompt that is not rendered by a chat template must start with `bos_id`. `encode` never adds it."""
        self.end_id = end_id
        """The token that ends a text to be embedded, if the model expects one. `encode` never adds it."""
        self.fill = fill
        """The tokens for filling in the middle of a text, if the model has them."""
        self.chat_template = chat_template
        """The Jinja source of the model's chat template, if it has one."""
        self.tool_template = tool_template
        """The Jinja source for conversations with tools, if the model has a separate one."""
        longest = max(len(self.written_bytes(i)) for i in self._bytes)
        self._bound = token_bound(backend, longest, alphabet.letters)
        for i, text in self._control.items():
            if not self._control.keys().isdisjoint(self.encode(text)):
                raise ModelError(f"token {i} is a control token, but the plain text {text!r} encodes to one")

    @property
    def vocab_size(self) -> int:
        """The highest token id plus one. A model's embedding may have further, unused rows."""
        return max(self._bytes) + 1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the texts of all tokens; equal for two tokenizers in which every id means the same."""
        digest = hashlib.sha256()
        for token, text in sorted((self._bytes | {i: t.encode() for i, t in self._control.items()}).items()):
            digest.update(token.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text)
        return digest.hexdigest()

    def control_text(self, token: int | None) -> str:
        """Returns the markup of control token `token`; "" for None and for other tokens."""
        return "" if token is None else self._control.get(token, "")

    def before(self, last_token: int | None) -> Before:
        """Returns what precedes a text appended after `last_token` (`None`: the text is the first)."""
        if last_token is None:
            return Before.NOTHING
        return Before.CONTROL if last_token in self._control else Before.TEXT

    def encode(
        self, text: str, special: bool = False, before: Before = Before.TEXT, restored: Callable[[str], str] = str
    ) -> list[int]:
        """Returns the token ids of `text`. Adds no tokens at either end; some models put a blank before the text,
        depending on what stands `before` it. With `special`, control tokens spelled out in `text` are encoded as such:
        use it for markup, never for users' text. `restored` is applied to the plain text between them. Raises
        `InvalidRequest` on lone surrogates."""
        if not special:
            return self._encode_plain(self._blanks.put(text, before))
        ids: list[int] = []
        for part in self.split_markup(text):
            if isinstance(part, int):
                ids.append(part)
                before = Before.CONTROL
            else:
                ids.extend(self._encode_plain(self._blanks.put(restored(part), before)))
                before = Before.TEXT
        return ids

    def least_tokens(self, text: str, spare: int = 0) -> int:
        """Returns a lower bound on the tokens of `text` (plain or markup) without encoding it, if `spare` of its bytes
        may vanish before it is encoded. 0 if one token can stand for text of any length."""
        return self._bound.least_tokens(text, spare) if self._bound is not None else 0

    def split_markup(self, text: str) -> Iterator[int | str]:
        """Yields the control tokens spelled out in `text`, as ids, and the plain text between them."""
        done = 0
        if self._control_pattern is not None:
            for match in self._control_pattern.finditer(text):
                if match.start() > done:
                    yield text[done : match.start()]
                yield self.control_ids[match[match.lastindex or 0]]
                done = match.end()
        if done < len(text):
            yield text[done:]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Returns the text of `ids`, with U+FFFD for broken UTF-8. Control tokens are omitted, or with `special`
        spelled out."""
        raw = b"".join(map(self.written_bytes if special else self.token_bytes, ids))
        return raw.decode("utf-8", errors="replace")

    def entry(self, token: int) -> str:
        """Returns a token's entry in the vocabulary; "" for unused ids."""
        return self._backend.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token, possibly incomplete UTF-8; b"" for control tokens and unused ids."""
        return self._bytes.get(token, b"")

    def written_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token; for a control token, those of its markup."""
        return self._control[token].encode() if token in self._control else self.token_bytes(token)

    def _encode_plain(self, text: str) -> list[int]:
        try:
            if len(text) < LONG_TEXT:
                ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            else:  # only this call releases the GIL
                ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError):  # versions of the library differ
            raise InvalidRequest("text has a lone surrogate; allowed: Unicode text") from None
        return ids


_BLANKS = r"[^\S\x1c-\x1f]*"
"""White space as Unicode defines it; Python's `\\s` matches four control characters more."""


def _control_pattern(backend: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """Returns the pattern of control tokens in markup, which prefers longer ones. A token may be declared to swallow
    the white space on its left or right; the group that matched holds the token's own text."""
    groups: dict[tuple[bool, bool], list[str]] = {}
    for token in backend.get_added_tokens_decoder().values():
        if token.special and token.content:
            groups.setdefault((token.lstrip, token.rstrip), []).append(token.content)
    alternatives = []
    for (left, right), texts in groups.items():
        either = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
        alternatives.append((_BLANKS if left else "") + f"({either})" + (_BLANKS if right else ""))
    return re.compile("|".join(alternatives)) if alternatives else None


def _token_bytes(backend: tokenizers.Tokenizer, alphabet: Alphabet) -> dict[int, bytes]:
    """Returns the bytes of every token id; b"" for control tokens. Raises `ModelError` if there are no tokens."""
    table = {i: alphabet.bytes_of(text) for text, i in backend.get_vocab(with_added_tokens=False).items()}
    for i, token in backend.get_added_tokens_decoder().items():
        table[i] = b"" if token.special else alphabet.added_bytes(token.content)
    if not table:
        raise ModelError("the tokenizer has no tokens")
    return table
