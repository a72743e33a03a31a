"""Sessions keep the state that earlier weights computed, if they are asked to, and nobody else uses it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tenuto.base.options import Scope
from tenuto.base.turns import OutputSpan
from tenuto.base.wire.state_file import CopiedState
from tenuto.exec.witness_hashes import START, advance, next_token
from tenuto.memory.lineage import Lineage, WeightsVersion, cut, extended
from tenuto.memory.tiers.contents import SPACING, Content, Digests
from tenuto.memory.tiers.lent import LentUnits
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.engine.stage import VOCABULARY, Stage, count_from, every_mix, every_overlap
from tests.sim.disk import FaultyDisk


class Weighed(Stage):
    """A stage whose weights are replaced."""

    def update(self, path: str, *, keep_state: bool = True, **options: Any) -> int:
        """Replaces the weights, and returns the new ones' mark."""
        weights = self.executor.load(path)
        self.engine.occupation.update(weights, path, keep_state=keep_state, **options)
        self.engine.audit()
        return weights.mark

    def starts(self, session: str = "s") -> list[tuple[int, str]]:
        """Returns where the state of each version begins."""
        lineage = self.engine.registry.get(session).memory.lineage
        return [(stamp.start, stamp.weights.name) for stamp in lineage]


def said(tokens: Sequence[int], marks: Sequence[tuple[int, int]], output: int) -> list[int]:
    """Returns the witness's output after `tokens`. `marks`: pairs of a position and the mark of the weights that
    compute from there on."""
    spans = [(start, stop, mark) for (start, mark), (stop, _) in pairwise([*marks, (10**9, 0)])]
    state, found = START, list[int]()
    for position in range(len(tokens) + output):
        if position >= len(tokens):
            found.append(next_token(state, VOCABULARY))
        token = tokens[position] if position < len(tokens) else found[-1]
        state = advance(state, token, next(mark for start, stop, mark in spans if start <= position < stop))
    return found


def history_of(stage: Stage, session: str = "s") -> list[int]:
    return list(stage.engine.registry.get(session).history)


@every_mix
@every_overlap
def test_a_session_goes_on_with_its_state_under_new_weights(mix, overlap: int) -> None:
    stage = Weighed(mix, overlap=overlap)
    session = stage.committed()
    history = history_of(stage)
    computed = session.memory.computed
    mark = stage.update("new")
    assert session.memory.computed == computed
    turn: Turn | None = None

    def go_on() -> Turn:
        nonlocal turn
        turn = stage.say("s", [7, 8], 5)
        return turn

    assert stage.cost(go_on) == len(history) - computed + 2 + 4
    assert turn is not None
    assert list(turn.output) == said([*history, 7, 8], [(0, 0), (computed, mark)], 5)
    assert stage.starts() == [(0, "default"), (computed, "1")]
    assert turn.result is not None
    assert turn.result.weight_versions == (OutputSpan(5, "1"),)
    assert session.records[-1].made is not None
    assert session.records[-1].made.versions == (OutputSpan(5, "1"),)


@every_mix
@every_overlap
def test_a_turn_goes_on_from_the_tokens_it_has_computed(mix, overlap: int) -> None:
    stage = Weighed(mix, overlap=overlap)
    session = stage.open()
    turn = stage.say("s", count_from(1, 20), 12)
    stage.until(lambda: len(turn.output) >= 4)
    before = list(turn.output)
    mark = stage.update("new")
    memory = session.memory.turn
    assert memory is not None
    at = memory.computed
    assert at > 0
    stage.play()
    given = count_from(1, 20)
    assert list(turn.output) == before + said([*given, *before], [(0, 0), (at, mark)], 12 - len(before))
    assert turn.result is not None
    assert turn.result.weight_versions == (OutputSpan(len(before), "default"), OutputSpan(12, "1"))
    assert stage.starts() == [(0, "default"), (at, "1")]


@every_mix
def test_an_aborted_turn_leaves_the_session_with_the_state_it_had(mix) -> None:
    stage = Weighed(mix)
    session = stage.committed()
    history, computed = history_of(stage), session.memory.computed
    turn = stage.say("s", [1, 2, 3, 4, 5], 8)
    stage.until(lambda: len(turn.output) >= 3)
    stage.update("second")
    stage.until(lambda: len(turn.output) >= 6)
    third = stage.update("third")
    stage.engine.turns.abort("s")
    assert (session.memory.computed, stage.starts()) == (computed, [(0, "default")])
    again = stage.say("s", [7], 4)
    stage.play()
    assert list(again.output) == said([*history, 7], [(0, 0), (computed, third)], 4)


@every_mix
def test_other_sessions_do_not_find_it_and_forks_have_it(mix) -> None:
    stage = Weighed(mix, prefix_cache=True)
    stage.committed()
    stage.committed("closed")
    stage.engine.sessions.close("closed")
    history, computed = history_of(stage), stage.engine.registry.get("s").memory.computed
    mark = stage.update("new")
    assert not stage.engine.registry.prefixes
    stage.open("other")
    turn = stage.say("other", [*history, 7], 4)
    fork = stage.engine.sessions.fork("s", child="fork")
    again = stage.say("fork", [7], 4)
    stage.play()
    assert turn.result is not None
    assert again.result is not None
    assert turn.result.usage.cached == 0
    assert again.result.usage.cached == computed
    assert list(turn.output) == said([*history, 7], [(0, mark)], 4)
    assert list(again.output) == said([*history, 7], [(0, 0), (computed, mark)], 4)
    assert fork.memory.lineage[0].weights.name == "default"
    later = stage.say(stage.open("later").id, [*history, 7], 4)  # this finds what the other has computed
    stage.play()
    assert later.result is not None
    assert later.result.usage.cached > 0
    assert list(later.output) == list(turn.output)


@every_mix
def test_a_prompt_is_not_shared_with_a_turn_that_began_under_other_weights(mix) -> None:
    stage = Weighed(mix, prefix_cache=True, token_budget=8)
    first = stage.say(stage.open("a").id, count_from(1, 40), 4)
    stage.until(lambda: first.session.memory.turn is not None and first.session.memory.turn.computed >= 16)
    mark = stage.update("new")
    second = stage.say(stage.open("b").id, count_from(1, 40), 4)
    stage.play()
    assert list(second.output) == said(count_from(1, 40), [(0, mark)], 4)


@every_mix
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_parked_state_comes_back_under_new_weights(mix, tier: str, tmp_path: Path) -> None:
    tiers: dict[str, Any] = (
        {"host_tier": 2**20} if tier == "host" else {"disk_tier": str(tmp_path / "-".join(kind.value for kind in mix))}
    )
    stage = Weighed(mix, **tiers)
    session = stage.committed()
    history, computed = history_of(stage), session.memory.computed
    stage.engine.pressure.drop(session)
    assert session.memory.computed == 0
    second = stage.update("second")
    turn = stage.say("s", [7], 4)
    stage.play()
    assert turn.result is not None
    assert turn.result.usage.cached == computed
    assert list(turn.output) == said([*history, 7], [(0, 0), (computed, second)], 4)
    history, again = history_of(stage), session.memory.computed
    stage.engine.pressure.drop(session)  # state of two weights
    third = stage.update("third")
    turn = stage.say("s", [8], 4)
    stage.play()
    assert list(turn.output) == said([*history, 8], [(0, 0), (computed, second), (again, third)], 4)


class _Never:
    """A chance that never comes."""

    def random(self) -> float:
        return 1.0

    def choice(self, options: Sequence[Any]) -> Any:
        return options[-1]


def state_of(stage: Stage, session: str = "s") -> int:
    """Returns the number of tokens whose state an export has."""
    state = stage.engine.states.of(session)
    if isinstance(state, LentUnits):
        stage.engine.states.take_back(state)
    else:
        assert isinstance(state, CopiedState)
    return state.position


@pytest.mark.parametrize("parked", [False, True])
def test_state_of_other_weights_is_not_exported(parked: bool) -> None:
    stage = Weighed(host_tier=2**20)
    session = stage.committed()
    if parked:
        stage.engine.pressure.drop(session)
    assert state_of(stage) == 35
    stage.update("new")
    assert state_of(stage) == 0
    stage.engine.sessions.drop("s")
    stage.say("s", [7], 3)
    stage.play()
    assert state_of(stage) == len(session.history) - 1


@every_mix
def test_state_of_other_weights_is_not_saved_for_the_next_process(mix) -> None:
    disk = FaultyDisk(_Never())  # type: ignore[arg-type]

    def begun(weights: str = "") -> Weighed:
        stage = Weighed(mix, disk=disk, checkpoint_rate=10**6, identity=weights)
        if weights:
            stage.executor.restore((), stage.executor.load(weights))
        stage.save_at_once()
        return stage

    stage = begun()
    for name in ("old", "new"):
        stage.committed(name)
    mark = stage.update("trained")
    stage.engine.sessions.drop("new")
    for name in ("old", "new"):
        stage.say(name, [7], 3)
    stage.play()
    saved = [stage.engine.registry.get(name).saved() for name in ("old", "new")]
    stage.engine.sessions.save()
    assert list(stage.engine.idle_memory.saves._records) == [("", "new")]
    stage.engine.end(keep=True)
    after = begun("trained")
    for each in saved:
        after.engine.sessions.restore(each)
    after.engine.sessions.recover()
    for each in saved:
        turn = after.say(each.session, [9], 3)
        after.play()
        assert turn.result is not None
        assert (turn.result.usage.cached > 0) is (each.session == "new")
        assert list(turn.output) == said([*each.tokens, 9], [(0, mark)], 3)


def test_saved_state_that_was_not_used_yet_is_kept() -> None:
    disk = FaultyDisk(_Never())  # type: ignore[arg-type]
    first = Weighed(disk=disk, checkpoint_rate=10**6)
    first.committed()
    saved = first.engine.registry.get("s").saved()
    first.engine.sessions.save()
    first.engine.end(keep=True)
    second = Weighed(disk=disk, checkpoint_rate=10**6)
    second.engine.sessions.restore(saved)
    second.engine.sessions.recover()
    mark = second.update("new")
    turn = second.say("s", [7], 3)
    second.play()
    assert turn.result is not None
    assert turn.result.usage.cached == 35
    assert list(turn.output) == said([*saved.tokens, 7], [(0, 0), (35, mark)], 3)


versions = st.lists(st.tuples(st.integers(0, 40), st.sampled_from("abc")), max_size=4)


def lineage_of(spans: Sequence[tuple[int, str]]) -> Lineage:
    found: Lineage = ()
    for start, identity in [(0, "first"), *sorted(spans)]:
        found = extended(found, start, WeightsVersion(identity))
    return found


@example([(0, "a")], [], 1, 1, Random(0))
@example([(1, "a")], [], 1, 1, Random(0))
@given(versions, versions, st.integers(1, 40), st.integers(0, 9), st.randoms())
def test_contents_have_the_same_name_only_if_the_same_weights_have_computed_them(
    one: list, other: list, begin: int, size: int, random: Any
) -> None:
    history, end = array("i", range(60)), begin + size
    mine, its = lineage_of(one), lineage_of(other)
    names = Digests(Scope("t"))
    found = [names.contents(history, [(begin, end)], each)[0] for each in random.choices([mine, its], k=4)]
    expected = [Digests(Scope("t")).contents(history, [(begin, end)], each)[0] for each in (mine, its)]
    assert all(each in expected for each in found)
    assert (expected[0] == expected[1]) is (cut(mine, end) == cut(its, end))
    assert expected[0].length == size
    assert Content.named(expected[0].name) == expected[0]


def test_digests_of_long_histories_follow_the_weights() -> None:
    history, names = array("i", range(3 * SPACING)), Digests(Scope("t"))
    at = 2 * SPACING + 5
    for spans in ([], [(SPACING + 1, "a")], [(SPACING + 1, "b")], [], [(5, "a")], [(SPACING, "a")]):
        lineage = lineage_of(spans)
        found = names.contents(history, [(at, at + 4)], lineage)
        assert found == Digests(Scope("t")).contents(history, [(at, at + 4)], lineage)


def test_a_later_update_without_keeping_drops_all_of_it() -> None:
    stage = Weighed(prefix_cache=True, host_tier=2**20)
    session = stage.committed()
    stage.committed("parked")
    stage.engine.pressure.drop(stage.engine.registry.get("parked"))
    history = history_of(stage)
    stage.update("second")
    mark = stage.update("third", keep_state=False)
    assert session.memory.computed == 0
    for name, tokens in (("s", history), ("parked", history_of(stage, "parked"))):
        turn = stage.say(name, [7], 4)
        stage.play()
        assert list(turn.output) == said([*tokens, 7], [(0, mark)], 4)
        assert stage.starts(name) == [(0, "2")]


def test_state_that_is_lost_is_computed_with_the_new_weights_alone() -> None:
    stage = Weighed(prefix_cache=True)
    stage.committed()
    history = history_of(stage)
    mark = stage.update("new")
    stage.engine.sessions.drop("s")
    turn = stage.say("s", [7], 4)
    stage.play()
    assert list(turn.output) == said([*history, 7], [(0, mark)], 4)
    assert stage.starts() == [(0, "1")]


def test_weights_with_equal_identities_are_the_same() -> None:
    stage = Weighed(prefix_cache=True)
    stage.update("new", keep_state=False, version="a")
    stage.committed()
    history = history_of(stage)
    stage.update("new", version="b")
    turn = stage.say("s", [7], 4)
    stage.play()
    assert stage.starts() == [(0, "a")]
    again = stage.say(stage.open("other").id, [*history, 7], 4)
    stage.play()
    assert again.result is not None
    assert again.result.usage.cached > 0
    assert list(again.output) == list(turn.output)


def test_vectors_are_averages_under_the_same_weights() -> None:
    stage = Weighed(token_budget=8)
    stage.open()
    turn = stage.say("s", count_from(1, 40), 1, pooling="mean")
    stage.until(lambda: turn.session.memory.turn is not None and turn.session.memory.turn.computed >= 16)
    stage.update("new")
    stage.play()
    other = Weighed(token_budget=8)
    other.update("new")
    alone = other.say(other.open().id, count_from(1, 40), 1, pooling="mean")
    other.play()
    assert turn.pool is not None
    assert alone.pool is not None
    assert turn.pool.vector() == alone.pool.vector() != b""


def test_a_session_that_takes_over_another_has_its_weights() -> None:
    stage = Weighed()
    session: Session = stage.committed()
    stage.update("new")
    stage.engine.sessions.fork("s", child="fork", hidden=True)
    stage.say("fork", [7], 5)
    stage.play()
    stage.engine.sessions.replace("s", "fork")
    assert stage.starts() == stage.starts("fork")
    assert session.memory.computed == stage.engine.registry.get("fork").memory.computed
    stage.engine.audit()


def test_weights_may_get_another_name_while_a_turn_runs() -> None:
    stage = Weighed()
    stage.open()
    turn = stage.say("s", [1, 2, 3], 8)
    stage.until(lambda: len(turn.output) >= 3)
    before = len(turn.output)
    stage.engine.occupation.name_weights("other")
    stage.play()
    assert turn.result is not None
    assert turn.result.weight_versions == (OutputSpan(before, "default"), OutputSpan(8, "other"))
    assert list(turn.output) == said([1, 2, 3], [(0, 0)], 8)
    assert stage.starts() == [(0, "default")]
    stage.say("s", [4], 50)
    stage.step()
    stage.engine.occupation.name_weights("third", abort=True)
    assert stage.engine.registry.get("s").turn is None


def test_a_fork_of_a_parked_session_has_state_of_the_same_weights() -> None:
    stage = Weighed(host_tier=2**20)
    session = stage.committed()
    first = session.memory.computed
    second = stage.update("second")
    stage.say("s", [7], 20)
    stage.play()
    history, again = history_of(stage), session.memory.computed
    stage.engine.pressure.drop(session)
    third = stage.update("third")
    stage.engine.sessions.fork("s", child="fork")
    turn = stage.say("fork", [8], 4)
    stage.play()
    assert turn.result is not None
    assert turn.result.usage.cached == again
    assert list(turn.output) == said([*history, 8], [(0, 0), (first, second), (again, third)], 4)
    assert stage.starts("fork") == [(0, "default"), (first, "1"), (again, "2")]


def test_tokens_computed_again_under_other_weights_are_counted_as_such() -> None:
    stage = Weighed()
    session = stage.committed()
    computed = session.memory.computed
    stage.update("new", keep_state=False)
    turn = stage.say("s", [7], 4)
    stage.play()
    assert turn.result is not None
    assert turn.result.usage.recomputed == {"weights changed": computed}
    stage.update("newer", keep_state=True)
    turn = stage.say("s", [7], 4)
    stage.play()
    assert turn.result is not None
    assert turn.result.usage.recomputed == {}
