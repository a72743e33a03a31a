"""Open turns as plain data, to go on in another engine."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass

from tenuto.base.errors import GrammarFailed
from tenuto.base.turns import OutputSpan, TurnState
from tenuto.base.wire.moves import MovedTurn
from tenuto.session.results import Once
from tenuto.session.turn import Turn
from tenuto.text.constraint import Constraint
from tenuto.text.stream import TextStream


def packed(turn: Turn, now: float, weights: str) -> MovedTurn:
    """Returns an open turn, which has no row and is no draft. `weights`: the name of those in use."""
    versions = [*turn.versions, *([OutputSpan(len(turn.output), weights)] if turn.output else [])]
    return MovedTurn(
        params=turn.params,
        base_length=turn.base_length,
        replaces=turn.replaces,
        input=turn.input.tobytes(),
        output=turn.output.tobytes(),
        max_new_tokens=turn.max_new_tokens,
        conversation=turn.conversation,
        prediction=turn.prediction.tobytes(),
        elapsed=now - turn.arrival,
        begun=now - turn.begun if turn.begun is not None else None,
        started=turn.started,
        recorded=turn.recorded,
        cached=turn.cached,
        computed_before=turn.computed_before,
        computed_tokens=turn.computed_tokens,
        guessed=turn.guessed,
        accepted=turn.accepted,
        recomputed=dict(turn.recomputed),
        versions=versions,
        output_logprobs=list(turn.output_logprobs),
        input_scores=list(turn.input_scores),
        once=turn.once.parts if turn.once is not None else None,
        ticket=turn.once.ticket if turn.once is not None else None,
    )


@dataclass(frozen=True, slots=True)
class Readied:
    """A moved turn whose text and grammar stand where its output ends. `text` and `constraint` are this turn's own."""

    moved: MovedTurn
    text: TextStream | None
    constraint: Constraint | None

    @classmethod
    def of(cls, moved: MovedTurn, text: TextStream | None, constraint: Constraint | None) -> Readied:
        """Passes the output so far through a fresh `text` and a fresh `constraint`. Any thread may call this. Raises
        `GrammarFailed` if the grammar is not the one that the output was made with."""
        if text is not None and moved.once is not None:
            text.keep_text()
        for token in _tokens(moved.output):
            if text is not None:
                text.push(token)
            if constraint is not None:
                constraint.push(token)
                if constraint.failure:
                    raise GrammarFailed(f"the output of a moved turn does not follow its grammar: {constraint.failure}")
        if text is not None:
            text.take_text()
        return cls(moved, text, constraint)

    def fill(self, turn: Turn, now: float, weights: str) -> None:
        """Fills a new turn of this one's session. `weights`: the name of those in use."""
        moved = self.moved
        turn.arrival, turn.changed = now - moved.elapsed, now - moved.elapsed
        turn.begun = now - moved.begun if moved.begun is not None else None
        turn.input, turn.output = _tokens(moved.input), _tokens(moved.output)
        turn.max_new_tokens, turn.replaces, turn.conversation = moved.max_new_tokens, moved.replaces, moved.conversation
        turn.prediction = _tokens(moved.prediction)
        turn.text, turn.constraint = self.text, self.constraint
        turn.started, turn.recorded = moved.started, moved.recorded
        turn.state = TurnState.PREEMPTED if moved.started else TurnState.QUEUED
        turn.cached, turn.computed_before, turn.computed_tokens = (
            moved.cached,
            moved.computed_before,
            moved.computed_tokens,
        )
        turn.guessed, turn.accepted, turn.recomputed = moved.guessed, moved.accepted, Counter(moved.recomputed)
        turn.versions = list(moved.versions)
        if turn.versions and turn.versions[-1].weight_version == weights:
            turn.versions.pop()
        turn.output_logprobs, turn.input_scores = list(moved.output_logprobs), list(moved.input_scores)
        if moved.once is not None:
            turn.once = Once(*moved.once)
            if moved.ticket is not None:
                turn.once.accepted(moved.ticket)


def _tokens(data: bytes) -> array[int]:
    tokens = array("i")
    tokens.frombytes(data)
    return tokens
