"""Texts of the tokens in answers and updates. Not for use in the engine's thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from tenuto.base.errors import InvalidRequest
from tenuto.base.turns import Delta
from tenuto.base.views import KeptTurn, RecordPage, Ticket, TokenizerView
from tenuto.text.tokenizer import Tokenizer


class Texts:
    """Adds texts to answers with a model's tokenizer; without one, answers are unchanged."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def of(self, tokens: Iterable[int], *, special: bool = True) -> str:
        """Returns the text of `tokens`, with control tokens spelled out if `special`. Raises `InvalidRequest` without a
        tokenizer."""
        if self._tokenizer is None:
            raise InvalidRequest("text needs a tokenizer, and this engine has none")
        return self._tokenizer.decode(tokens, special=special)

    def entry(self, token: int) -> str:
        """Returns a token's entry in the vocabulary, "" for unused ids. Raises `InvalidRequest` without a tokenizer."""
        if self._tokenizer is None:
            raise InvalidRequest("text needs a tokenizer, and this engine has none")
        return self._tokenizer.entry(token)

    def describe(self) -> TokenizerView:
        """Describes the tokenizer. Raises `InvalidRequest` without one."""
        if self._tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer")
        known = self._tokenizer
        return TokenizerView(
            vocab_size=known.vocab_size,
            bos=known.control_text(known.bos_id) or None,
            eos=known.control_text(known.eos_ids[0] if known.eos_ids else None) or None,
            chat_template=known.chat_template,
        )

    def of_ticket(self, ticket: Ticket) -> Ticket:
        """Adds the text of a ticket's prompt."""
        return msgspec.structs.replace(ticket, text=self.of(ticket.prompt)) if self._tokenizer is not None else ticket

    def of_page(self, page: RecordPage) -> RecordPage:
        """Adds the texts of a page's turns."""
        if self._tokenizer is None:
            return page
        records = [
            replace(each, input_text=self.of(each.input_tokens), output_text=self.of(each.output_tokens))
            for each in page.records
        ]
        return msgspec.structs.replace(page, records=records)

    def of_kept(self, turn: KeptTurn) -> KeptTurn:
        """Adds the texts of the prompt and the log-probabilities of a turn kept for repeated requests."""
        ticket = self.of_ticket(turn.ticket) if turn.ticket.prompt else turn.ticket
        return msgspec.structs.replace(turn, ticket=ticket, output=self.of_delta(turn.output))

    def of_delta(self, delta: Delta) -> Delta:
        """Adds the bytes of the tokens in a delta's log-probabilities."""
        if self._tokenizer is None or not delta.scores:
            return delta
        return delta.with_bytes(self._tokenizer.written_bytes)
