"""What one turn has said so far, as its one reader has seen it."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress

from tenuto.base.errors import EngineStopped
from tenuto.base.turns import Keep, Transcript, TurnResult, done
from tenuto.client.connection import Connection
from tenuto.client.feed import Deliver, Feed, Source


class TurnReader(Transcript):
    """Starts a turn and adds up its news. How news travel and how to wait for them is its user's business."""

    def __init__(self, connection: Connection, source: Source, deliver: Deliver) -> None:
        super().__init__()
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

    def abort(self, keep: Keep) -> Future[TurnResult]:
        """End the turn, keeping what `keep` says. Raises `InvalidRequest`, or `EngineStopped` if it can end no more."""
        kept = self.tokens_to_keep(keep)
        if self.result is not None:
            return done(self.result)
        self.begin_abort()
        try:
            return self._connection.call(self._feed.abort(kept))
        except EngineStopped:  # closed, and so nothing more comes
            ended = self._feed.ended
            if ended.done() and ended.exception() is None:
                return ended
            raise

    def disconnect(self) -> None:
        """Nobody reads any more. The server rolls the turn back if it has not ended and is not to continue without."""
        with suppress(EngineStopped):
            self._running.cancel()
