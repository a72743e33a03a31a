"""What sessions should contain, kept in the most naive way: lists of tokens, copied."""

from __future__ import annotations

from collections.abc import Sequence

from tenuto.exec.witness import START, advance, next_token


class NaiveSession:
    """A history as a list of tokens, the hash after each of them, and turn boundaries as (start, input_end, end)."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.hashes: list[int] = [START]
        self.records: list[tuple[int, int, int]] = []
        self.version = 0
        self.turn: NaiveTurn | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.hashes.append(advance(self.hashes[-1], token))

    def cut_tokens(self, position: int) -> None:
        del self.tokens[position:]
        del self.hashes[position + 1 :]

    def cut(self, position: int) -> None:
        self.cut_tokens(position)
        kept = []
        for start, input_end, end in self.records:
            if start < position:
                kept.append((start, min(input_end, position), min(end, position)))
        self.records = kept

    def fork(self, position: int) -> NaiveSession:
        child = NaiveSession()
        child.tokens, child.hashes, child.records = list(self.tokens), list(self.hashes), list(self.records)
        child.cut(position)
        return child


class NaiveTurn:
    """What one turn will say: every token follows from all before it, until a stop id or the limit."""

    def __init__(
        self, session: NaiveSession, base: int, tokens: Sequence[int], most: int, stops: set[int], vocab: int
    ) -> None:
        self.base = base
        self.input = list(tokens)
        self.most = most
        self.stops = stops
        self._vocab = vocab
        self._state = session.hashes[base]
        for token in tokens:
            self._state = advance(self._state, token)
        self.output: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.most or (bool(self.output) and self.output[-1] in self.stops)

    def check(self, output: Sequence[int]) -> None:
        """Raise unless `output`, which only grows, is what this turn says."""
        assert len(output) >= len(self.output), f"output shrank from {len(self.output)} to {len(output)} tokens"
        for position in range(len(self.output), len(output)):
            assert not self.finished, f"output goes on after its end: {list(output)}"
            token = next_token(self._state, self._vocab)
            assert output[position] == token, f"output {position} is {output[position]}, the history says {token}"
            self.output.append(token)
            self._state = advance(self._state, token)

    def guess(self, output: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens after `output`, which was checked."""
        self.check(output)
        state, guesses = self._state, []
        for _ in range(count):
            guesses.append(next_token(state, self._vocab))
            state = advance(state, guesses[-1])
        return guesses
