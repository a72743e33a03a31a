"""The records of committed turns, and saved sessions, as plain data."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import msgspec
from msgspec.structs import replace

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import Policy
from tenuto.base.turns import OutputSpan
from tenuto.base.wire.document import Conversation, SavedAdapter, SavedTurn, SessionDocument

Versions = tuple[OutputSpan, ...]
"""The weights that sampled a turn's output; without output, those in use at its end."""


def cut_versions(versions: Iterable[OutputSpan], kept: int) -> Versions:
    """Returns the versions of the first `kept` tokens, without those that sampled none of them, unless there are no
    tokens; then the last one stays."""
    spans: list[OutputSpan] = []
    end = 0
    for span in versions:
        if min(span.output_tokens, kept) > end:
            end = min(span.output_tokens, kept)
            spans.append(OutputSpan(end, span.weight_version))
        elif not end:
            last = OutputSpan(0, span.weight_version)
    return tuple(spans) or (last,)


class Made(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How a turn was made. `seed`: with which its output was sampled; `None` without one, or for the likeliest tokens.
    `logprobs`: of its output tokens, float32, if they were asked for."""

    versions: Versions
    seed: int | None = None
    logprobs: bytes = b""

    def cut(self, kept: int) -> Made:
        """Returns this for the first `kept` output tokens."""
        seed = self.seed if kept else None
        return Made(cut_versions(self.versions, kept), seed, self.logprobs[: LOGPROB_BYTES * kept])


LOGPROB_BYTES = 4


class TurnRecord(msgspec.Struct, frozen=True, gc=False):
    """A committed turn in the history: input is tokens [start, input_end), output [input_end, end). `conversation`: the
    conversation up to its end; `None` if the turn was given as tokens and not as messages. `cut`: whether the history
    was cut inside its input. `made`: `None` if the turn was computed elsewhere, or by a version that did not record
    it."""

    start: int
    input_end: int
    end: int
    conversation: Conversation | None = None
    cut: bool = False
    made: Made | None = None

    @property
    def logprob_bytes(self) -> int:
        """The size of its log-probabilities."""
        return len(self.made.logprobs) if self.made is not None else 0


class Origin(msgspec.Struct, frozen=True, gc=False):
    """Where a session was forked: from the first `position` tokens of the session `parent`, which are its first `turns`
    turns or the beginning of the last of these. `birth`: see `Session.birth`; another session may have the same id
    later."""

    parent: str
    birth: int
    position: int
    turns: int


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A session as plain data, without its memory, which can be computed again. A session rebuilt from this data, in
    the same engine or in another, continues in the same way. `results`: see `KeptTurns`. `used`: the time of its last
    recorded use, in seconds since the epoch. `birth`, `origin`, `epoch`: see `Session`; unknown for one from another
    engine. `begun`: the request of a turn that another replica had accepted and not ended; see `messages.StartTurn`."""

    session: str
    policy: Policy
    system: str | None
    version: int
    tokens: array[int]
    records: tuple[TurnRecord, ...]
    results: tuple[tuple[str, bytes], ...] = ()
    used: float | None = field(default=None, compare=False)
    birth: int | None = field(default=None, compare=False)
    origin: Origin | None = field(default=None, compare=False)
    epoch: int = field(default=0, compare=False)
    begun: bytes | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Raises `InvalidRequest` if the records do not cover the tokens."""
        covered = 0
        for record in self.records:
            if not covered == record.start <= record.input_end <= record.end:
                covered = -1
                break
            covered = record.end
        if covered != len(self.tokens):
            raise InvalidRequest(
                f"session {self.session!r} cannot be restored: its records do not cover its {len(self.tokens)} tokens"
            )

    def document(self) -> SessionDocument:
        """Returns the contents of a session file, without the fields about the model."""
        policy, adapter = self.policy, self.policy.adapter
        return SessionDocument(
            id=self.session,
            system=self.system,
            version=self.version,
            priority=policy.priority,
            ttl=policy.ttl,
            max_tokens=policy.max_tokens,
            metadata=dict(policy.metadata),
            turns=[self._turn(record) for record in self.records],
            adapter=SavedAdapter(name=adapter.name, digest=adapter.digest) if adapter is not None else msgspec.UNSET,
        )

    def _turn(self, record: TurnRecord) -> SavedTurn:
        return SavedTurn(
            input=list(self.tokens[record.start : record.input_end]),
            output=list(self.tokens[record.input_end : record.end]),
            conversation=record.conversation,
            cut=record.cut,
        )

    @classmethod
    def of(cls, document: SessionDocument, session: str, policy: Policy) -> SavedSession:
        """Returns the session of a document, with this id and policy. Raises `InvalidRequest`."""
        try:
            tokens = array("i", chain.from_iterable(chain(turn.input, turn.output) for turn in document.turns))
        except OverflowError:
            raise InvalidRequest(f"session {session!r} cannot be restored: a token id has more than 32 bits") from None
        records, end = [], 0
        for turn in document.turns:
            start, input_end = end, end + len(turn.input)
            end = input_end + len(turn.output)
            records.append(TurnRecord(start, input_end, end, turn.conversation, turn.cut))
        return cls(session, policy, document.system, document.version, tokens, tuple(records))


def cut_records(records: list[TurnRecord], position: int) -> list[TurnRecord]:
    """Returns the records of the first `position` tokens."""
    kept = [r for r in records if r.start < position]
    if kept and kept[-1].end > position:
        last = kept.pop()
        cut = last.cut or position < last.input_end
        made = last.made.cut(max(0, position - last.input_end)) if last.made is not None else None
        kept.append(replace(last, input_end=min(last.input_end, position), end=position, cut=cut, made=made))
    return kept
