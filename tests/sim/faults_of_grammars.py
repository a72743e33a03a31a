"""More planted faults, of grammars. See `faults`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenuto.base.tools.grammar import Grammar
from tenuto.engine.flights import Flights
from tenuto.engine.lifecycle import Lifecycle
from tenuto.sched.proposal import Flight
from tenuto.session.turn import Turn
from tenuto.text.constraint import Constraint, Matcher
from tenuto.text.grammars import GrammarCompiler, GrammarMatcher
from tests.sim.faults import replaced, together


def forks_and_samples_share_a_matcher() -> Any:
    """All turns with the same grammar advance one matcher."""
    shared: dict[Grammar, Constraint] = {}

    def make(original: Any) -> Any:
        def constraint(self: GrammarCompiler, grammar: Grammar, bad_words: Sequence[str] = ()) -> Constraint:
            made: Constraint = original(self, grammar, bad_words)
            made._matcher = shared.setdefault(grammar, made)._matcher
            return made

        return constraint

    return replaced(GrammarCompiler, "constraint", make)


def rejected_guesses_stay_in_the_matcher() -> Any:
    """The turn continues from the matcher state that rejected guesses led to."""
    return replaced(GrammarMatcher, "copy", lambda original: lambda self: self)


def a_failed_step_has_moved_the_matcher() -> Any:
    """After a failed step a turn's matcher is one token ahead of the turn."""

    def make(original: Any) -> Any:
        def retry(self: Flights, failed: Flight) -> None:
            for turn in self._live(failed):
                if turn.constraint is not None:
                    _take_any(turn.constraint)
            original(self, failed)

        return retry

    return replaced(Flights, "retry", make)


def _take_any(constraint: Constraint) -> None:
    """Advances by the first token that is allowed."""
    masks = constraint.masks(())
    if masks is not None:
        constraint.push(next(token for token in range(32) if masks[0, 0] >> token & 1))
        constraint.failure = ""


def a_preempted_turn_follows_its_grammar_from_the_beginning() -> Any:
    """The turn keeps its output but loses its position in the grammar."""
    beginnings: dict[int, Matcher] = {}

    def make(original: Any) -> Any:
        def preempt(self: Lifecycle, turn: Turn, *more: Any) -> None:
            original(self, turn, *more)
            if turn.constraint is not None:
                turn.constraint._matcher = beginnings[id(turn.constraint)]

        return preempt

    def remembering(original: Any) -> Any:
        def constraint(self: Constraint, matcher: Matcher, *more: Any) -> None:
            original(self, matcher, *more)
            beginnings[id(self)] = matcher.copy()

        return constraint

    return together(replaced(Constraint, "__init__", remembering), replaced(Lifecycle, "preempt", make))


def a_mask_is_used_for_the_next_token_too() -> Any:
    """The mask for one token is used again for the next one."""

    def make(original: Any) -> Any:
        def push(self: Constraint, token: int) -> bool:
            known = self._next
            complete: bool = original(self, token)
            self._next = known
            return complete

        return push

    return replaced(Constraint, "push", make)


FAULTS_OF_GRAMMARS = (
    forks_and_samples_share_a_matcher,
    rejected_guesses_stay_in_the_matcher,
    a_failed_step_has_moved_the_matcher,
    a_preempted_turn_follows_its_grammar_from_the_beginning,
    a_mask_is_used_for_the_next_token_too,
)
