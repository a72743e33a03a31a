"""What one turn has said so far, as its one reader has seen it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Literal, NamedTuple, Protocol

from tenuto.base.checks import whole
from tenuto.base.errors import InvalidRequest, TenutoError
from tenuto.session.turn import TurnResult

Keep = int | Literal["delivered"] | None
"""What of an aborted turn is committed: nothing; its input and so many output tokens; its input and what was read."""


class News(Protocol):
    """What a turn has brought since its last news. `delivered`: leading output tokens whose text is out, up to now.
    `result`: in the last news, that of the turn."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def text(self) -> str: ...
    @property
    def delivered(self) -> int: ...
    @property
    def result(self) -> TurnResult | None: ...


class Said(NamedTuple):
    """`News` as plain data."""

    tokens: tuple[int, ...]
    text: str
    delivered: int
    result: TurnResult | None


class Transcript:
    """Adds up a turn's news. After an abort nothing counts until the result says what of it is kept."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.result: TurnResult | None = None
        self.failure: TenutoError | None = None
        self._pieces: list[str] = []  # of text
        self._held: list[News] = []  # read after the abort
        self._delivered = 0
        self._aborting = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def ended(self) -> bool:
        """Whether no news is to be waited for. Raises the error that ended the turn, if one did."""
        if self.failure is not None:
            raise self.failure
        return self.result is not None

    def take(self, news: News | TenutoError) -> News:
        """The reader has got `news`; what of it counts now. Raises it if it is an error."""
        if isinstance(news, TenutoError):
            self.failure = news
            raise news
        if self._aborting:
            self._held.append(news)
            news = self._kept(news.result)
        self.token_ids.extend(news.tokens)
        if news.text:
            self._pieces.append(news.text)
        self._delivered = news.delivered
        self.result = news.result
        return news

    def _kept(self, result: TurnResult | None) -> Said:
        """What an aborted turn has said since the abort, as far as it is kept: nothing until its end."""
        if result is None or not result.committed or result.kept < len(self.token_ids):
            return Said((), "", self._delivered, result)
        room = result.kept - len(self.token_ids)
        tokens = [token for news in self._held for token in news.tokens][:room]
        whole_ones = [news for news in self._held if news.delivered <= result.kept]  # no text of tokens not kept
        delivered = whole_ones[-1].delivered if whole_ones else self._delivered
        return Said(tuple(tokens), "".join(news.text for news in whole_ones), delivered, result)

    def tokens_to_keep(self, keep: Keep) -> int | None:
        """`keep` as a number of output tokens, `None` for nothing at all. Raises `InvalidRequest`."""
        if keep is None:
            return None
        if isinstance(keep, str):
            if keep != "delivered":
                raise InvalidRequest(f"keep is {keep!r}; allowed: none, a number of output tokens, or 'delivered'")
            return self._delivered
        return whole("keep", keep, 0, 2**40)

    def begin_abort(self) -> None:
        """What is read from now on may not be kept."""
        self._aborting = True


def done(result: TurnResult) -> Future[TurnResult]:
    """A future that already has `result`."""
    future: Future[TurnResult] = Future()
    future.set_result(result)
    return future
