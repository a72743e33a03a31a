"""The texts of what answers and updates show as tokens. For any thread but the engine's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from tenuto.base.errors import InvalidRequest
from tenuto.base.sampling import Candidate, TokenLogprob
from tenuto.base.turns import Delta
from tenuto.base.views import KeptTurn, RecordPage, Ticket
from tenuto.text.tokenizer import Tokenizer


class Texts:
    """Decodes with a model's tokenizer, if it has one."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def of(self, tokens: Iterable[int], *, special: bool = True) -> str:
        """Their text, with the control tokens written out if `special`. Raises `InvalidRequest` without a tokenizer."""
        if self._tokenizer is None:
            raise InvalidRequest("text needs a tokenizer, and this engine has none")
        return self._tokenizer.decode(tokens, special=special)

    def of_ticket(self, ticket: Ticket) -> Ticket:
        """With the text of its prompt."""
        return msgspec.structs.replace(ticket, text=self.of(ticket.prompt)) if self._tokenizer is not None else ticket

    def of_page(self, page: RecordPage) -> RecordPage:
        """With the texts of its turns."""
        if self._tokenizer is None:
            return page
        records = [
            replace(each, input_text=self.of(each.input_tokens), output_text=self.of(each.output_tokens))
            for each in page.records
        ]
        return msgspec.structs.replace(page, records=records)

    def of_kept(self, turn: KeptTurn) -> KeptTurn:
        """With the texts that its answers had."""
        ticket = self.of_ticket(turn.ticket) if turn.ticket.prompt else turn.ticket
        return msgspec.structs.replace(turn, ticket=ticket, output=self.of_delta(turn.output))

    def of_delta(self, delta: Delta) -> Delta:
        """With what the tokens of its log-probabilities say."""
        tokenizer = self._tokenizer
        if tokenizer is None or not (delta.logprobs or delta.input_logprobs):
            return delta
        raw = tokenizer.written_bytes

        def told(entry: TokenLogprob) -> TokenLogprob:
            top = tuple(Candidate(other.token, other.logprob, raw(other.token)) for other in entry.top)
            return TokenLogprob(entry.token, entry.logprob, top, raw(entry.token))

        inputs = tuple(told(entry) if entry is not None else None for entry in delta.input_logprobs)
        return msgspec.structs.replace(delta, logprobs=tuple(map(told, delta.logprobs)), input_logprobs=inputs)
