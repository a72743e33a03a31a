"""The checks that a turn must pass before it queues; a rejected turn has changed nothing."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from tenuto.base.checks import whole
from tenuto.base.errors import ContextExceeded, InvalidRequest, Overloaded, Unsupported
from tenuto.base.options import TurnParams
from tenuto.engine.core import Core
from tenuto.session.session import Session
from tenuto.session.turn import as_tokens
from tenuto.text.constraint import Constraint
from tenuto.text.stream import TextStream

TextFactory = Callable[[tuple[str, ...], int, bool, tuple[str, ...], tuple[tuple[str, int], ...]], TextStream]
"""Makes the text stream of a turn. The arguments are those of `TextStream` after the tokenizer: stop strings, the
number of tokens without stops, whether the stop is kept, stop patterns, and marks."""


class TurnGate:
    """Checks new turns, and determines how many tokens they may generate."""

    def __init__(self, core: Core, vocab_size: int, text: TextFactory | None, *, generates: bool) -> None:
        self._queue = core.queue
        self._max_queued = core.config.max_queued
        self._vocab_size = vocab_size
        self._context_length = core.config.context_length
        self._text = text
        self._generates = generates
        self._adapters = core.adapters

    def read(self, tokens: Iterable[int]) -> array[int]:
        """Reads and checks the caller's tokens. Reading may run the caller's code, so operations do this first. Raises
        the errors of `as_tokens`."""
        return as_tokens(tokens, self._vocab_size, self._context_length)

    def allowed(self, session: Session, prompt: int, wanted: int | None) -> int:
        """Returns the number of tokens, at most `wanted`, that a turn with `prompt` tokens of history and input may
        generate. Raises `InvalidRequest` or `ContextExceeded`."""
        room = session.limit - prompt
        if wanted != 0 and prompt == 0:
            raise InvalidRequest("there is nothing to continue: history and input are empty; give at least one token")
        if room < (0 if wanted == 0 else 1):
            allowed = session.limit - (0 if wanted == 0 else 1)
            raise ContextExceeded.of(prompt, allowed, session.limit, exact=True)
        return room if wanted is None else min(wanted, room)

    def adapter(self, session: Session) -> int:
        """Returns the slot of the session's adapter, which stays there until its turn has ended; 0 without an adapter.
        Raises `AdapterNotLoaded`."""
        return self._adapters.slot(session.id, session.policy)

    def admit(self, params: TurnParams, constraint: Constraint | None = None) -> TextStream | None:
        """Returns the turn's text stream, or `None` if the engine has no tokenizer. `constraint`: that of the turn's
        grammar and bad words. Raises `InvalidRequest`, `Unsupported`, and `Overloaded` if too many turns wait."""
        if not self._generates and (params.scores_input or (params.pooling is None and params.generates)):
            raise Unsupported("this model makes embeddings only; its files have no output matrix to generate with")
        if params.constrained and constraint is None:
            name = "grammar" if params.grammar is not None else "bad_words"
            raise InvalidRequest(f"{name} needs a tokenizer, and this engine has none", param=name)
        for token in params.stop_ids:
            whole("a stop id", token, 0, self._vocab_size - 1)
        biased = tuple(token for token, _ in params.sampling.logit_bias)
        limited, named = params.sampling.allowed_ids, params.logprob_ids
        for name, ids in (("logit_bias", biased), ("allowed_ids", limited), ("logprob_ids", named)):
            if ids and (highest := max(ids)) >= self._vocab_size:
                raise InvalidRequest(
                    f"{name} has {highest}; allowed: below {self._vocab_size}, the size of the vocabulary", param=name
                )
        if self._queue.submitted >= self._max_queued:
            raise Overloaded(f"{self._max_queued} turns are waiting, the most allowed; try again later")
        if self._text is not None:
            return self._text(params.stop, params.min_new_tokens, params.include_stop, params.stop_regex, params.marks)
        if params.stop or params.stop_regex:
            raise InvalidRequest("stop strings need a tokenizer, and this engine has none; use stop_ids")
        return None
