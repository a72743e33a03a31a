"""State that is saved while the engine runs comes back after a kill for sessions with the same adapter, and never for
others."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from tenuto.base.groups import Kind
from tenuto.memory.tiers.unit_files import INDEX, SUFFIX
from tenuto.session.records import SavedSession
from tests.engine.stage import Stage, count_from, every_mix
from tests.engine.test_adapters import load, opened
from tests.engine.test_saved_while_running import killed, running, steps
from tests.engine.test_snapshots import outcomes
from tests.present import present
from tests.tiered import parking_in

ADAPTERS = {"plain": None, "one": "a", "two": "b"}
"""Sessions of the same tokens, and their adapters."""
MORE = [7, 8]


def with_adapters(stage: Stage, *order: str) -> Stage:
    for name in order:
        load(stage, name)
    return stage


def saved_and_killed(tier: Path, mix: tuple[Kind, ...]) -> list[SavedSession]:
    """Returns the sessions of a journal after a kill, which have the same tokens and their state in `tier`."""
    stage = with_adapters(running(tier, mix), "a", "b")
    for name, adapter in ADAPTERS.items():
        opened(stage, name, adapter)
        stage.append(name, count_from(1, 50))
        stage.play()
        steps(stage)  # each session has files of its own
    return killed(stage)


def expected(saved: list[SavedSession], mix: tuple[Kind, ...]) -> dict[str, tuple[int, ...]]:
    """Returns how each session goes on if everything is computed."""
    stage = with_adapters(Stage(mix), "a", "b")
    for session in saved:
        stage.engine.sessions.restore(session)
    return {name: output for name, (output, _) in continued(stage, saved).items()}


def continued(stage: Stage, saved: list[SavedSession]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Returns the output of a turn of each session, and its number of cached tokens."""
    turns = {each.session: stage.say(each.session, MORE, 3) for each in saved}
    stage.play()
    stage.engine.audit()
    return {name: (tuple(turn.output), present(turn.result).usage.cached) for name, turn in turns.items()}


def begun_again(tier: Path, mix: tuple[Kind, ...], saved: list[SavedSession]) -> Stage:
    """Returns a stage in which the adapters have other slots than before."""
    stage = with_adapters(running(tier, mix), "b", "a")
    for session in saved:
        stage.engine.sessions.restore(session)
    stage.engine.sessions.recover()
    return stage


@every_mix
def test_each_session_gets_back_its_own_state_after_a_kill(mix: tuple[Kind, ...], tmp_path: Path) -> None:
    saved = saved_and_killed(tmp_path, mix)
    outputs = expected(saved, mix)
    assert len({*outputs.values()}) == 3
    stage = begun_again(tmp_path, mix, saved)
    assert continued(stage, saved) == {name: (outputs[name], 49) for name in ADAPTERS}
    assert not parking_in(stage.engine).tiers.failures


@every_mix
@pytest.mark.parametrize("shift", [1, 2])
def test_state_in_the_index_of_a_session_with_another_adapter_is_not_read(
    mix: tuple[Kind, ...], shift: int, tmp_path: Path
) -> None:
    """Sessions of the same names as before have other adapters, as if an index were older than its journal."""
    saved = saved_and_killed(tmp_path, mix)
    policies = [session.policy for session in saved]
    moved = [replace(each, policy=policies[(i + shift) % 3]) for i, each in enumerate(saved)]
    outputs = expected(moved, mix)
    stage = begun_again(tmp_path, mix, moved)
    assert continued(stage, moved) == {name: (outputs[name], 0) for name in ADAPTERS}
    assert outcomes(stage)["stale"] == 3


@every_mix
def test_a_file_of_another_adapter_is_not_read_although_the_index_names_it(
    mix: tuple[Kind, ...], tmp_path: Path
) -> None:
    """The index has the right marks and the wrong files: their names are exchanged."""
    saved = saved_and_killed(tmp_path, mix)
    outputs = expected(saved, mix)
    with sqlite3.connect(tmp_path / INDEX) as index:
        names = [name for (name,) in index.execute("SELECT name FROM files ORDER BY id")]
        sizes = [size for (size,) in index.execute("SELECT size FROM files ORDER BY id")]
    kinds = len(names) // 3  # a session has a file of full pages, and one of a single position, or one of the two
    assert len(names) == len(list(tmp_path.glob(f"*{SUFFIX}"))) == 3 * kinds
    assert sizes == 3 * sizes[:kinds]
    contents = [(tmp_path / name).read_bytes() for name in names]
    for name, content in zip(names, [*contents[kinds:], *contents[:kinds]], strict=True):
        (tmp_path / name).write_bytes(content)
    stage = begun_again(tmp_path, mix, saved)
    assert continued(stage, saved) == {name: (outputs[name], 0) for name in ADAPTERS}
    assert parking_in(stage.engine).tiers.failures.total() == 3


def test_state_waits_on_disk_until_the_adapter_is_loaded(tmp_path: Path) -> None:
    saved = saved_and_killed(tmp_path, (Kind.FULL,))
    outputs = expected(saved, (Kind.FULL,))
    stage = running(tmp_path)
    for session in saved:
        stage.engine.sessions.restore(session)
    stage.engine.sessions.recover()
    plain = [session for session in saved if session.policy.adapter is None]
    assert continued(stage, plain) == {"plain": (outputs["plain"], 49)}
    with_adapters(stage, "b", "a")
    others = [session for session in saved if session.policy.adapter is not None]
    assert continued(stage, others) == {name: (outputs[name], 49) for name in ("one", "two")}
