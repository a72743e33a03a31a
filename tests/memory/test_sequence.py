"""Sessions and their turns, in every mix of groups, over memory with known contents: no token is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tenuto.base.errors import InvariantError
from tests.memory.scribe import FULL, SLIDING, STATE, Scribe, Script, Writing
from tests.present import present

MIXES = [[FULL], [SLIDING], [STATE], [FULL, SLIDING], [FULL, STATE], [SLIDING, STATE], [FULL, SLIDING, STATE]]
MAX_SESSIONS = 4


class SequenceMachine(RuleBasedStateMachine):
    """Turns that compute, mark, commit, abort and redraft; forks, rewinds, evictions and drops."""

    @initialize(
        mix=st.sampled_from(MIXES), page_size=st.sampled_from([1, 3, 5]), window=st.integers(2, 9), double=st.booleans()
    )
    def begin(self, mix, page_size: int, window: int, double: bool) -> None:
        self.scribe = Scribe(mix, units=200, page_size=page_size, window=window, overlap=double, lookahead=4)
        self.scribe.committed(9)

    def _pick(self, data: st.DataObject, wanted) -> Script:
        return data.draw(st.sampled_from([s for s in self.scribe.scripts if wanted(s)]))

    def _any(self, wanted) -> bool:
        return hasattr(self, "scribe") and any(wanted(s) for s in self.scribe.scripts)

    @staticmethod
    def _idle(script: Script) -> bool:
        return script.writing is None

    @staticmethod
    def _busy(script: Script) -> bool:
        return script.writing is not None

    def _pick_writing(self, data: st.DataObject) -> Writing:
        return present(self._pick(data, self._busy).writing)

    @precondition(lambda self: self._any(SequenceMachine._idle))
    @rule(data=st.data(), whole=st.booleans(), tokens=st.integers(0, 2))
    def open_turn(self, data: st.DataObject, whole: bool, tokens: int) -> None:
        """Opens a turn with `tokens` tokens of input; its last token is always computed."""
        script = self._pick(data, SequenceMachine._idle)
        base = len(script.history) if whole else data.draw(st.integers(0, len(script.history)))
        writing = self.scribe.open(script, base, target=max(0, min(base, base + tokens - 1)))
        writing.least = base + tokens

    @precondition(lambda self: self._any(SequenceMachine._busy))
    @rule(data=st.data(), tokens=st.integers(1, 9), mark=st.booleans())
    def compute(self, data: st.DataObject, tokens: int, mark: bool) -> None:
        writing = self._pick_writing(data)
        if writing.computed < 40:
            self.scribe.compute(writing, tokens)
            if mark:
                self.scribe.mark(writing)

    @precondition(lambda self: self._any(SequenceMachine._busy))
    @rule(data=st.data(), tokens=st.integers(2, 5))
    def compute_guesses(self, data: st.DataObject, tokens: int) -> None:
        writing = self._pick_writing(data)
        if writing.computed < 40:
            self.scribe.compute(writing, tokens, accepted=data.draw(st.integers(1, tokens)))

    @precondition(lambda self: self._any(SequenceMachine._busy))
    @rule(data=st.data(), whole=st.booleans())
    def commit(self, data: st.DataObject, whole: bool) -> None:
        script = self._pick(data, SequenceMachine._busy)
        writing = present(script.writing)
        least = writing.least
        reached = max(writing.computed + 1, least)
        length = reached if whole else data.draw(st.integers(least, reached))
        last = max(0, length - 1)
        can_keep = max(writing.memory.cut_to(last), script.memory.resumable(min(last, writing.base)))
        self.scribe.commit(script, length)
        assert script.memory.computed == min(can_keep, last)

    @precondition(lambda self: self._any(SequenceMachine._busy))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        script = self._pick(data, SequenceMachine._busy)
        before = script.memory.computed
        self.scribe.abort(script)
        assert script.memory.computed == before

    @precondition(lambda self: self._any(SequenceMachine._busy))
    @rule(data=st.data())
    def redraft(self, data: st.DataObject) -> None:
        writing = self._pick_writing(data)
        least = max(writing.base, writing.begun_with)
        self.scribe.redraft(writing, data.draw(st.integers(least, max(least, writing.computed))))

    @precondition(lambda self: self._any(SequenceMachine._busy))
    @rule(data=st.data())
    def rest_and_go_on(self, data: st.DataObject) -> None:
        writing = self._pick_writing(data)
        if writing.guessed:  # as a paused turn; drafts, which rest, have no guesses
            self.scribe.redraft(writing, writing.computed)
        else:
            writing.memory.detach()
            self.scribe.attach(writing)

    @precondition(lambda self: len(self.scribe.scripts) < MAX_SESSIONS)
    @rule(data=st.data(), whole=st.booleans())
    def fork(self, data: st.DataObject, whole: bool) -> None:
        parent = self._pick(data, lambda s: True)
        at = len(parent.history) if whole else data.draw(st.integers(0, len(parent.history)))
        could = parent.memory.resumable(max(0, at - 1))
        child = self.scribe.fork(parent, at)
        assert child.memory.computed == could

    @precondition(lambda self: self._any(SequenceMachine._busy) and len(self.scribe.scripts) < MAX_SESSIONS)
    @rule(data=st.data())
    def begin_with_a_turns(self, data: st.DataObject) -> None:
        writing = self._pick_writing(data)
        most = max(0, min(writing.computed, len(writing.tokens) - 1))  # the other computes its last token
        child = self.scribe.fork_turn(writing, data.draw(st.integers(0, most)))
        assert child is None or child.memory.computed == len(child.history) - 1

    @precondition(lambda self: self._any(SequenceMachine._idle))
    @rule(data=st.data(), little=st.booleans())
    def rewind(self, data: st.DataObject, little: bool) -> None:
        script = self._pick(data, SequenceMachine._idle)
        at = data.draw(st.integers(max(0, len(script.history) - (2 if little else 99)), len(script.history)))
        could = script.memory.resumable(max(0, at - 1))
        self.scribe.rewind(script, at)
        assert script.memory.computed == could

    @precondition(lambda self: self._any(SequenceMachine._idle))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self._pick(data, SequenceMachine._idle).memory.drop()

    @rule()
    def evict(self) -> None:
        self.scribe.memory.cache.evict()

    @invariant()
    def every_session_says_what_it_should_and_every_unit_is_held(self) -> None:
        if hasattr(self, "scribe"):
            self.scribe.audit()

    def teardown(self) -> None:
        if not hasattr(self, "scribe"):
            return
        for script in self.scribe.scripts:
            if script.writing is not None:
                self.scribe.abort(script)
            script.memory.drop()
        assert self.scribe.free() == [200] * len(self.scribe.memory.pools)


SequenceMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
test_no_session_ever_loses_what_it_computed = SequenceMachine.TestCase


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "+".join(kind.value for kind in mix))
def test_a_fork_copies_nothing_until_it_writes(mix) -> None:
    scribe = Scribe(mix)
    parent = scribe.committed(11)
    before = scribe.free()
    child = scribe.fork(parent)
    assert scribe.free() == before
    assert child.memory.computed == parent.memory.computed == 10
    assert scribe.copies == []


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "+".join(kind.value for kind in mix))
def test_an_aborted_turn_releases_exactly_what_it_acquired(mix) -> None:
    scribe = Scribe(mix)
    script = scribe.committed(11)
    before = scribe.free()
    scribe.compute(scribe.open(script), 20)
    assert scribe.free() < before
    scribe.abort(script)
    assert (scribe.free(), script.memory.computed) == (before, 10)
    scribe.audit()


def test_a_session_has_at_most_one_turn_in_memory() -> None:
    scribe = Scribe([FULL])
    script = scribe.committed(5)
    scribe.open(script)
    with pytest.raises(InvariantError, match="already has a turn"):
        scribe.open(script)


def test_a_turn_that_removes_the_end_of_a_history_and_adds_nothing_leaves_its_session_cut() -> None:
    scribe = Scribe([FULL])
    script = scribe.committed(9)
    scribe.open(script, 4, target=3)
    scribe.commit(script, 4)
    assert script.memory.computed == 3
    scribe.audit()


def test_a_session_is_not_cut_under_its_open_turn() -> None:
    scribe = Scribe([FULL])
    script = scribe.committed(5)
    scribe.open(script)
    with pytest.raises(InvariantError, match="cut while its turn is open"):
        script.memory.truncate(2)
