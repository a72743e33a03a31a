"""The text of one turn: decides what can be delivered and whether a stop string or pattern has ended it."""

from __future__ import annotations

from collections import deque

from tenuto.text.decoder import IncrementalDecoder
from tenuto.text.stops import StopMatcher
from tenuto.text.tokenizer import Tokenizer


class TextStream:
    """Turns a turn's output tokens into text and finds its stops. An engine takes `functools.partial(TextStream,
    tokenizer)` as its `text`.

    Text is held back if it is an incomplete character or may still become a stop. Invariant: for every token that ends
    with a complete character and is not yet fully delivered, `_ends` holds, in order, the numbers of characters and of
    tokens up to its end. So a turn is never cut inside a character.
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
        """Stops are not matched in the text of the first `min_tokens` tokens, and may not begin there. The stop itself
        is delivered only with `include_stop`. `marks`: texts and ids of control tokens to deliver as text, for parsing
        the answer. Raises `InvalidRequest` if `stop` or `stop_regex` is not a valid list."""
        self._decoder = IncrementalDecoder(tokenizer, {token: text.encode() for text, token in marks})
        self._matcher = StopMatcher(stop, stop_regex)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._ends: deque[tuple[int, int]] = deque()
        self._tokens = 0
        self._decoded = 0  # characters of text so far
        self._delivered = 0  # characters delivered so far
        self.delivered_tokens = 0
        """Number of leading output tokens whose text is fully delivered. They never end inside a character."""
        self._pieces: list[str] = []  # delivered, not yet taken
        self._kept: list[tuple[int, str]] | None = None  # if kept: delivered pieces, each with the token count by then

    def push(self, token: int) -> bool:
        """Takes the next output token. Returns True if a stop is complete; text after it is dropped."""
        self._tokens += 1
        return self._pass_on(self._decoder.push((token,)))

    def finish(self) -> None:
        """Delivers the text held back; call it after the last token."""
        if not self._pass_on(self._decoder.flush()):
            self._deliver(self._matcher.flush())

    @property
    def stop(self) -> str | None:
        """The stop string or pattern that ended the text, if one did."""
        return self._matcher.matched

    def keep_text(self) -> None:
        """Keeps all delivered text for `text`; call it before the first token."""
        self._kept = []

    def text(self, tokens: int) -> str:
        """Returns the delivered text of the first `tokens` tokens; "" if `keep_text` was not called."""
        return "".join(text for end, text in self._kept or () if end <= tokens)

    def take_text(self) -> str:
        """Returns the text delivered since the last call."""
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
            self.delivered_tokens = self._ends.popleft()[1]
        if text and self._kept is not None:
            self._kept.append((self.delivered_tokens, text))
