"""Messages between the edges of a fleet's replicas, in MessagePack."""

from __future__ import annotations

import msgspec

from tenuto.base.turns import Delta, Keep
from tenuto.base.views import SessionKey
from tenuto.base.wire.messages import ListSessions
from tenuto.base.wire.moves import LiveStream, StateEnd, StateOffer, StatePiece
from tenuto.base.wire.replies import Refusal


class Between(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the requests of a replica to another."""


class Reserve(Between, frozen=True, kw_only=True):
    """See `messages.ReserveMove`."""

    move: str
    offer: StateOffer


class Put(Between, frozen=True, kw_only=True):
    """See `messages.PutMove`."""

    move: str
    piece: StatePiece


class Take(Between, frozen=True, kw_only=True):
    """See `messages.TakeMove`. Answered, once the session has its new owner, with the `News` of its open turn, whose
    `stream` continues there. `reader`: stands for the asking replica among the turn's readers."""

    move: str
    tenant: str
    session: str
    end: StateEnd
    stream: LiveStream | None
    reader: str = ""


class Drop(Between, frozen=True, kw_only=True):
    """See `messages.DropMove`."""

    move: str


class Follow(Between, frozen=True, kw_only=True):
    """Answer with the deltas of the turn of this name after so many tokens and characters of its output. `reader`: see
    `Take`."""

    tenant: str
    session: str
    name: str
    tokens: int
    characters: int
    reader: str = ""


class Abort(Between, frozen=True, kw_only=True):
    """Abort the turn of this name; see `messages.AbortTurn`. `unread`: only because it has no more readers at the
    asking replica, which is `reader`; so it continues if it has other readers where this arrives. Answered with whether
    it continues, or with nothing."""

    tenant: str
    session: str
    name: str
    keep: Keep
    unread: bool = False
    reader: str = ""


class Move(Between, frozen=True, kw_only=True):
    """Move a session of the receiving replica to the one at `url`. Answered once it is there."""

    tenant: str
    session: str
    url: str


class Forget(Between, frozen=True, kw_only=True):
    """Overwrite what the replica has of a session that was erased; see `messages.EraseTraces`. Answered as that is."""

    tenant: str
    session: str


class Empty(Between, frozen=True, kw_only=True):
    """Begin to empty the replica that receives this."""


class List(Between, frozen=True, kw_only=True):
    """Answer with a `Listing` of the sessions that the replica has in memory; see `messages.ListSessions`."""

    asked: ListSessions


class Fate(Between, frozen=True, kw_only=True):
    """Answer with the output of a response, in JSON. The replica has the response's session."""

    tenant: str
    response: str


AnyBetween = Reserve | Put | Take | Drop | Follow | Abort | Move | Forget | Empty | List | Fate


class News(msgspec.Struct, frozen=True, array_like=True):
    """A delta of a turn, or the error that ended it."""

    delta: Delta | None = None
    refusal: Refusal | None = None


def key_of(request: Take | Follow | Abort | Move | Forget) -> SessionKey:
    """Returns the key of the session of a request."""
    return request.tenant, request.session


class Unsaid:
    """Passes on a turn's output after its first `tokens` and `characters`. It is given the deltas from the beginning; a
    turn that was begun again at another replica may have fewer tokens for a while."""

    def __init__(self, tokens: int, characters: int) -> None:
        self._tokens = tokens
        self._characters = characters

    @property
    def left(self) -> tuple[int, int]:
        """The numbers of tokens and characters that have yet to come before the part to pass on."""
        return self._tokens, self._characters

    def of(self, delta: Delta) -> Delta | None:
        """Returns the part of the next delta that is to be passed on, if any."""
        if not self._tokens and not self._characters:
            return delta
        tokens, characters = min(self._tokens, len(delta.tokens)), min(self._characters, len(delta.text))
        self._tokens -= tokens
        self._characters -= characters
        rest = Delta(
            delta.tokens[tokens:],
            delta.text[characters:],
            delta.delivered,
            delta.result,
            delta.logprobs[tokens:],
            (),  # they came before the first token
            delta.vector,
        )
        return rest if rest != Delta(delivered=rest.delivered) else None
