"""No unit computed under one adapter is ever read under another; sessions keep their adapter, by its weights."""

import pytest

from tenuto.base.errors import (
    AdapterBusy,
    AdapterNotLoaded,
    AlreadyExists,
    InvalidRequest,
    InvariantError,
    ModelNotFound,
    NotFound,
)
from tenuto.base.options import SessionAdapter, TurnParams
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.engine.stage import Stage, every_mix, every_overlap
from tests.tiered import parking_in

TEXT = [*range(1, 25)]


def stage_with(*names: str, **config: object) -> Stage:
    stage = Stage(**{"prefix_cache": True} | config)  # type: ignore[arg-type]
    for name in names:
        load(stage, name)
    return stage


def load(stage: Stage, name: str, path: str = "", *, replace: bool = False) -> None:
    weights = stage.executor.read_adapter(path or f"/{name}")
    stage.engine.adapters.load(name, path or f"/{name}", weights, replace=replace)


def opened(stage: Stage, session_id: str, adapter: str | None) -> Session:
    return stage.open(session_id, adapter=SessionAdapter.named(adapter))


def played(stage: Stage, session_id: str) -> Turn:
    turn = stage.say(session_id, TEXT, 4)
    stage.play()
    return turn


@every_overlap
@every_mix
def test_sessions_share_prefixes_only_with_sessions_of_their_adapter(mix: tuple, overlap: int) -> None:
    stage = stage_with("a", "b", mix=mix, overlap=overlap)
    said: dict[str | None, object] = {}
    for number, adapter in enumerate((None, "a", "b", "a", None)):
        opened(stage, f"s{number}", adapter)
        turn = played(stage, f"s{number}")
        assert turn.result is not None
        assert (turn.result.usage.cached > 0) == (adapter in said)
        assert said.setdefault(adapter, tuple(turn.output)) == tuple(turn.output)
    assert len({*said.values()}) == 3


def test_turns_with_different_adapters_run_in_one_step_and_share_nothing() -> None:
    stage = stage_with("a", "b")
    for name, adapter in (("s", None), ("t", "a"), ("u", "b"), ("v", "b")):
        opened(stage, name, adapter)
    turns = [stage.say(name, TEXT, 4) for name in "stuv"]
    stage.play()
    together = [plan.adapters.tolist() for plan in stage.executor.plans if plan.adapters is not None]
    assert any({0, 1, 2} <= set(slots) for slots in together)
    assert turns[2].output == turns[3].output
    assert len({tuple(turn.output) for turn in turns}) == 3
    assert [turn.looked in ("open", "closed", "running") for turn in turns] == [False, False, False, True]


def test_plans_without_adapters_say_nothing_of_them() -> None:
    stage = stage_with("a")
    stage.committed()
    assert all(plan.adapters is None for plan in stage.executor.plans)


def test_forks_have_the_adapter_and_share_memory() -> None:
    stage = stage_with("a")
    session = opened(stage, "s", "a")
    played(stage, "s")
    child = stage.engine.sessions.fork("s", child="t")
    assert child.policy.adapter == session.policy.adapter
    assert child.memory.computed > 0
    turn, again = stage.say("s", [7], 3), stage.say("t", [7], 3)
    stage.play()
    assert turn.output == again.output


def test_an_adapter_with_open_turns_cannot_be_unloaded() -> None:
    stage = stage_with("a")
    for name in "st":
        opened(stage, name, "a")
    turn, _ = stage.say("s", TEXT, 4), stage.engine.turns.draft("t", TEXT)
    stage.step()
    with pytest.raises(AdapterBusy, match="open turns with the adapter 'a' is 2"):
        stage.engine.adapters.unload("a")
    with pytest.raises(AdapterBusy):
        load(stage, "a", "/other", replace=True)
    stage.engine.turns.abort("t")
    stage.play()
    assert turn.result is not None
    stage.engine.adapters.unload("a")


@every_overlap
def test_sessions_outlive_their_adapter_and_go_on_with_their_memory(overlap: int) -> None:
    stage = stage_with("a", overlap=overlap)
    session = opened(stage, "s", "a")
    played(stage, "s")
    computed = session.memory.computed
    stage.engine.adapters.unload("a")
    for refused in (
        lambda: stage.say("s", [7], 3),
        lambda: stage.engine.turns.draft("s", [7]),
        lambda: stage.engine.turns.regenerate("s", TurnParams(max_new_tokens=3)),
    ):
        with pytest.raises(AdapterNotLoaded, match="session s continues with the adapter 'a'"):
            refused()
    assert (session.turn, session.memory.computed) == (None, computed)
    load(stage, "again", "/a")
    turn = stage.say("s", [7], 3)
    stage.play()
    assert turn.result is not None
    assert turn.result.usage.cached == computed


def test_a_step_in_flight_ends_with_the_adapter_it_began_with() -> None:
    stage = stage_with("a", overlap=1)
    opened(stage, "s", "a")
    stage.say("s", TEXT, 9)
    for _ in range(3):
        stage.step()
    stage.engine.turns.abort("s")
    stage.engine.adapters.unload("a")
    load(stage, "b")
    stage.play()


def test_other_weights_of_the_same_name_never_see_old_state() -> None:
    stage = stage_with("a")
    opened(stage, "s", "a")
    before = played(stage, "s").output
    load(stage, "a", "/other", replace=True)
    with pytest.raises(AdapterNotLoaded, match="the adapter of that name has other weights"):
        stage.say("s", [7], 3)
    opened(stage, "t", "a")
    turn = played(stage, "t")
    assert turn.result is not None
    assert turn.result.usage.cached == 0
    assert turn.output != before


def test_names_of_the_same_weights_share_a_slot_and_memory() -> None:
    stage = stage_with("a")
    load(stage, "b", "/a")
    opened(stage, "s", "a")
    first = played(stage, "s")
    stage.engine.adapters.unload("a")
    opened(stage, "t", "b")
    second = played(stage, "t")
    assert second.result is not None
    assert second.result.usage.cached > 0
    assert first.output == second.output


def test_a_saved_session_waits_for_its_adapter() -> None:
    stage = stage_with("a")
    opened(stage, "s", "a")
    played(stage, "s")
    saved = stage.engine.sessions._registry.get("s").saved()
    later = stage_with()
    session = later.engine.sessions.restore(saved)
    assert session.policy == saved.policy
    with pytest.raises(AdapterNotLoaded):
        later.say("s", [7], 3)
    load(later, "a")
    turn, expected = later.say("s", [7], 3), stage.say("s", [7], 3)
    later.play()
    stage.play()
    assert turn.output == expected.output


def test_parked_memory_of_another_adapter_is_never_restored() -> None:
    """Two sessions have the same tokens; their parked memory is exchanged, which a bug might do."""
    stage = stage_with("a", "b", prefix_cache=False, host_tier=10**6)
    a, b = (opened(stage, name, name) for name in "ab")
    for session in (a, b):
        stage.append(session.id, TEXT)
        stage.play()
        stage.engine.pressure.drop(session)
    known = parking_in(stage.engine)._sessions
    known[a], known[b] = known[b], known[a]
    stage.say("a", [7], 3)
    with pytest.raises(InvariantError, match="of other tokens"):
        stage.play()


def test_adapters_need_names_of_their_own_and_sessions_need_loaded_ones() -> None:
    stage = stage_with("a")
    with pytest.raises(AlreadyExists, match="'a' is loaded already"):
        load(stage, "a", "/other")
    for name in ("", "x" * 129, "a\nb"):
        with pytest.raises(InvalidRequest, match="lora_name"):
            stage.engine.adapters.load(name, "/x", stage.executor.read_adapter("/x"))
    with pytest.raises(ModelNotFound, match="no adapter 'b'; loaded: 'a'"):
        opened(stage, "s", "b")
    with pytest.raises(NotFound, match="no adapter 'b'"):
        stage.engine.adapters.unload("b")
