"""The text of one turn: what may be delivered of it, and when a stop string or pattern ends it."""

from __future__ import annotations

from collections import deque

from tenuto.text.decoder import IncrementalDecoder
from tenuto.text.stops import StopMatcher
from tenuto.text.tokenizer import Tokenizer


class TextStream:
    """Turns a turn's output tokens into text, and finds its stops. `functools.partial(TextStream, tokenizer)` is
    what an engine takes as its `text`.

    Two things hold text back: bytes that are not a whole character yet, and characters that may still become a stop.
    Invariant: `_ends` has, in order, for every token that ends with a character and is not yet delivered whole,
    how many characters and how many tokens there are by its end. No turn is cut inside a character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        stop_regex: tuple[str, ...] = (),
        marks: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """In the text that the first `min_tokens` tokens bring no stop is looked for, nor the beginning of one. The
        text keeps what ends it, a stop string or what matches a pattern, only with `include_stop`. `marks`: control
        tokens that the text has, for whoever takes it apart, by their texts. Raises
        `InvalidRequest` if `stop` is not a list of stop strings, or `stop_regex` not one of patterns."""
        self._decoder = IncrementalDecoder(tokenizer, {token: text.encode() for text, token in marks})
        self._matcher = StopMatcher(stop, stop_regex)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._ends: deque[tuple[int, int]] = deque()
        self._tokens = 0
        self._decoded = 0  # characters
        self._delivered = 0  # characters
        self._delivered_tokens = 0
        self._pieces: list[str] = []  # delivered, not yet taken
        self._kept: list[tuple[int, str]] | None = None  # all that was delivered, after how many tokens, if asked for

    def push(self, token: int) -> bool:
        """Take the next output token; True if a stop is now complete, and whatever follows is no text."""
        self._tokens += 1
        return self._pass_on(self._decoder.push((token,)))

    def finish(self) -> None:
        """No more tokens: deliver what was held back."""
        if not self._pass_on(self._decoder.flush()):
            self._deliver(self._matcher.flush())

    @property
    def stop(self) -> str | None:
        """The stop string or pattern that ended the text, if one did."""
        return self._matcher.matched

    @property
    def delivered_tokens(self) -> int:
        """Leading output tokens whose text has been delivered whole. They never end inside a character."""
        return self._delivered_tokens

    def keep_text(self) -> None:
        """From the beginning on, keep what is delivered for `text`."""
        self._kept = []

    def text(self, tokens: int) -> str:
        """What was delivered of the first `tokens` tokens, if that was kept."""
        return "".join(text for end, text in self._kept or () if end <= tokens)

    def take_text(self) -> str:
        """Text delivered since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def _pass_on(self, text: str) -> bool:
        self._decoded += len(text)
        if not self._decoder.pending:
            self._ends.append((self._decoded, self._tokens))
        if self._tokens <= self._min_tokens:
            self._deliver(text)
            return False
        ended = self.stop is not None
        deliverable, stop = self._matcher.push(text)
        self._deliver(deliverable + stop if stop is not None and self._include_stop and not ended else deliverable)
        return stop is not None

    def _deliver(self, text: str) -> None:
        if text:
            self._pieces.append(text)
        self._delivered += len(text)
        while self._ends and self._ends[0][0] <= self._delivered:
            self._delivered_tokens = self._ends.popleft()[1]
        if text and self._kept is not None:
            self._kept.append((self._delivered_tokens, text))
