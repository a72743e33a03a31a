"""What one turn has said so far, as its one reader has seen it."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from typing import Literal

from tenuto.base.checks import whole
from tenuto.base.errors import EngineStopped, InvalidRequest, TenutoError
from tenuto.client.connection import Connection
from tenuto.client.feed import Deliver, Event, Feed, Source, Update
from tenuto.session.turn import TurnResult

Keep = int | Literal["delivered"] | None
"""As `tenuto.api.reader.Keep`."""


class TurnReader:
    """Starts a turn and adds up its updates. How they travel and how to wait for them is its user's business."""

    def __init__(self, connection: Connection, source: Source, deliver: Deliver) -> None:
        self.token_ids: list[int] = []
        self.result: TurnResult | None = None
        self._pieces: list[str] = []  # of text
        self._held: list[Update] = []  # read after the abort; the result says what of them is kept
        self._delivered = 0
        self._aborting = False
        self._failure: TenutoError | None = None
        self._connection = connection
        self._feed = Feed(connection, source, deliver)
        self._running = connection.call(self._feed.run())

    @property
    def started(self) -> Future[None]:
        """Done when the server has accepted the turn."""
        return self._feed.started

    @property
    def turn_id(self) -> str | None:
        """What the server calls the turn, once it has accepted it."""
        return self._feed.turn_id

    @property
    def time_to_first_token(self) -> float | None:
        return self._feed.time_to_first_token

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def ended(self) -> bool:
        """Whether no update is to be waited for. Raises the error that ended it, if one did."""
        if self._failure is not None:
            raise self._failure
        return self.result is not None

    def take(self, event: Event) -> Update:
        """The reader has got `event`. Raises it if it is an error."""
        if isinstance(event, TenutoError):
            self._failure = event
            raise event
        if self._aborting:
            self._held.append(event)
            event = self._kept(event.result)
        self.token_ids.extend(event.tokens)
        if event.text:
            self._pieces.append(event.text)
        self._delivered = event.delivered
        self.result = event.result
        return event

    def _kept(self, result: TurnResult | None) -> Update:
        """What an aborted turn has said since the abort, as far as it is kept: nothing until its end."""
        if result is None or not result.committed or result.kept < len(self.token_ids):
            return Update((), "", self._delivered, result)
        room = result.kept - len(self.token_ids)
        tokens = [token for update in self._held for token in update.tokens][:room]
        whole_ones = [update for update in self._held if update.delivered <= result.kept]  # no text of tokens not kept
        text = "".join(update.text for update in whole_ones)
        return Update(tuple(tokens), text, whole_ones[-1].delivered if whole_ones else self._delivered, result)

    def abort(self, keep: Keep) -> Future[TurnResult]:
        """End the turn, keeping what `keep` says. Raises `InvalidRequest`, or `EngineStopped` if it can end no more."""
        if isinstance(keep, str):
            if keep != "delivered":
                raise InvalidRequest(f"keep is {keep!r}; allowed: none, a number of output tokens, or 'delivered'")
            keep = self._delivered
        elif keep is not None:
            keep = whole("keep", keep, 0, 2**40)
        if self.result is not None:
            return _done(self.result)
        self._aborting = True
        try:
            return self._connection.call(self._feed.abort(keep))
        except EngineStopped:  # closed, and so nothing more comes
            ended = self._feed.ended
            if ended.done() and ended.exception() is None:
                return ended
            raise

    def disconnect(self) -> None:
        """Nobody reads any more. The server rolls the turn back if it has not ended and is not to continue without."""
        with suppress(EngineStopped):
            self._running.cancel()


def _done(result: TurnResult) -> Future[TurnResult]:
    future: Future[TurnResult] = Future()
    future.set_result(result)
    return future
