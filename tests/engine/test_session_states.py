"""A session's state moves to another engine in a file: its next turn there computes only new tokens, and foreign or
damaged files are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.base.errors import InvalidRequest, InvariantError, SessionBusy
from tenuto.base.wire.document import SessionDocument
from tenuto.base.wire.state_file import CopiedState, StateFile, is_state_file, replacing, write_state_file
from tenuto.memory.tiers.lent import LentUnits
from tenuto.memory.tiers.unit_files import UnitFiles
from tenuto.session.records import SavedSession
from tests.engine.stage import FULL, PAGE, STATE, Stage, continuation, every_mix
from tests.present import present

MODEL, WEIGHTS = "a model", "weights"


def exported(stage: Stage, name: str, path: Path) -> Path:
    document = stage.engine.registry.get(name).saved().document().signed(MODEL)
    state = stage.engine.states.of(name)
    if isinstance(state, LentUnits):
        lent, state = state, state.read()
        stage.engine.states.take_back(lent)
    write_state_file(path, document, WEIGHTS, PAGE, stage.engine.states.unit_bytes, state)
    return path


def imported(stage: Stage, path: Path, name: str = "s") -> None:
    with closing(StateFile(path)) as file:
        file.check(MODEL, WEIGHTS)
        stage.engine.states.check(file)
        file.verify()
        stage.engine.sessions.restore(SavedSession.of(file.document, name, file.document.policy()))
        stage.engine.states.put(name, file)
    stage.engine.audit()


def goes_on(stage: Stage, name: str, *tokens: int) -> int:
    """Checks that the session continues correctly; returns the number of cached tokens."""
    history = list(stage.engine.registry.get(name).history)
    turn = stage.say(name, tokens, 3)
    stage.play()
    stage.engine.audit()
    assert list(turn.output) == continuation([*history, *tokens], 3)
    return present(turn.result).usage.cached


def outcomes(stage: Stage) -> dict[str, int]:
    return dict(stage.engine.counts.imports)


@every_mix
@pytest.mark.parametrize("where", ["device", "parked", "partly parked", "on disk", "tokens"])
def test_an_imported_session_computes_only_new_tokens(mix, where: str, tmp_path: Path) -> None:
    disk = UnitFiles(tmp_path / "tier", 10**6) if where == "on disk" else None
    here = Stage(mix, host_tier=0 if disk is not None else 10**6, disk=disk)
    here.committed("s", 50)
    if where == "tokens":
        here.engine.sessions.drop("s")
    elif where != "device":
        if where == "partly parked":
            here.engine.sessions.fork("s", child="fork")
        here.engine.pressure.drop(here.engine.registry.get("s"))
    path = exported(here, "s", tmp_path / "file")
    there = Stage(mix, overlap=1)
    imported(there, path)
    assert goes_on(there, "s", 7, 8) == (0 if where == "tokens" else 55)
    assert goes_on(here, "s", 7, 8) == (0 if where == "tokens" else 55)
    assert outcomes(there) == ({} if where == "tokens" else {"imported": 1})
    there.engine.sessions.close("s")
    assert all(pool.free == pool.capacity for pool in there.engine.memory.pools)


def test_memory_parked_under_an_aborted_turn_can_be_imported(tmp_path: Path) -> None:
    """Known fault: memory that a waiting turn had found elsewhere was parked with the state of all its session's
    tokens, including the last, which no engine accepts."""
    here = Stage(host_tier=10**6, prefix_cache=True, max_running=1)
    for name, tokens in (("s", 20), ("longer", 24)):
        here.open(name)
        here.append(name, range(tokens))
        here.play()
    session = here.engine.registry.get("s")
    here.engine.sessions.drop("s")
    here.open("busy")
    here.say("busy", range(500, 510), 50)
    here.step()
    here.say("s", [20], 1)
    here.step()
    assert session.memory.computed == len(session.history) == 20
    here.engine.pressure.drop(session)
    here.engine.audit()
    here.engine.turns.abort("s")
    there = Stage()
    imported(there, exported(here, "s", tmp_path / "file"))
    assert goes_on(there, "s", 7) == 0


@every_mix
def test_an_imported_session_shares_its_memory_like_any_other(mix, tmp_path: Path) -> None:
    """Known fault: after a fork within one of its pages, audits reported the rest of that page as being written."""
    here = Stage(mix)
    here.committed("s", 50)
    there = Stage(mix)
    imported(there, exported(here, "s", tmp_path / "file"))
    there.engine.sessions.fork("s", position=31, child="fork")
    there.engine.audit()
    goes_on(there, "fork", 7)
    assert goes_on(there, "s", 7) == 55


@every_mix
def test_idle_sessions_yield_to_an_imported_one(mix, tmp_path: Path) -> None:
    path = exported(told(mix), "s", tmp_path / "file")
    there = Stage(mix, units=60 if FULL in mix else 14)
    for number in range(12):
        there.committed("y" * (number + 1), 60)
    imported(there, path)
    assert goes_on(there, "s", 7) == 55


@pytest.mark.parametrize("tier", ["none", "host", "disk"])
def test_a_session_imported_beside_running_turns_is_parked_or_recomputed(tier: str, tmp_path: Path) -> None:
    path = exported(told((FULL,)), "s", tmp_path / "file")
    disk = UnitFiles(tmp_path / "tier", 10**6) if tier == "disk" else None
    there = Stage(units=50, host_tier=10**6 if tier == "host" else 0, disk=disk)
    there.open("busy")
    running = there.say("busy", range(150), 40)
    there.until(lambda: len(running.output) > 2)
    imported(there, path)
    assert outcomes(there) == {"no room" if tier == "none" else "imported": 1}
    there.play()
    assert goes_on(there, "s", 7) == (0 if tier == "none" else 55)


def test_copies_that_fail_cost_only_time(tmp_path: Path) -> None:
    here = told((FULL, STATE))
    path = exported(here, "s", tmp_path / "file")
    there = Stage((FULL, STATE))
    there.executor._copy_fails = lambda: True
    imported(there, path)
    assert outcomes(there) == {"copy failed": 1}
    assert all(pool.free == pool.capacity for pool in there.engine.memory.pools)
    assert goes_on(there, "s", 7) == 0
    here.executor._copy_fails = lambda: True
    with pytest.raises(InvalidRequest, match="cannot be copied"):
        here.engine.states.of("s")


def test_a_group_that_refuses_to_lease_free_units_breaks_an_invariant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported(told((FULL, STATE)), "s", tmp_path / "file")
    there = Stage((FULL, STATE))
    monkeypatch.setattr(there.engine.memory.pools[0], "acquire", lambda *_: None)
    with pytest.raises(InvariantError, match="full0 has 300 free units, but does not lease 14"):
        imported(there, path)


def test_a_session_with_an_open_turn_is_refused() -> None:
    stage = told((FULL,))
    stage.say("s", [1], 50)
    stage.step()
    with pytest.raises(SessionBusy, match="export the state"):
        stage.engine.states.of("s")


def told(mix: Any) -> Stage:
    stage = Stage(mix)
    stage.committed("s", 50)
    return stage


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return exported(told((FULL, STATE)), "s", tmp_path / "file")


def test_any_changed_or_missing_byte_is_found(file: Path) -> None:
    content = file.read_bytes()
    assert is_state_file(content[:16])
    rng = np.random.default_rng(0)
    for at in (*range(12), *rng.integers(12, len(content), 200).tolist()):
        damaged = bytearray(content)
        damaged[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        with pytest.raises(InvalidRequest):
            read(file)
    for kept in (0, 5, 9, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:kept])
        with pytest.raises(InvalidRequest):
            read(file)
    file.write_bytes(content + b"x")
    with pytest.raises(InvalidRequest, match="damaged"):
        read(file)


def read(path: Path) -> None:
    """Checks a file as an import does."""
    with closing(StateFile(path)) as opened:
        opened.check(MODEL, WEIGHTS)
        opened.verify()


@pytest.fixture
def stage() -> Iterator[Stage]:
    engine = Stage((FULL, STATE))
    yield engine
    assert not len(engine.engine.registry)


def test_state_of_other_weights_or_another_layout_is_refused(file: Path, tmp_path: Path, stage: Stage) -> None:
    with closing(StateFile(file)) as opened:
        state, document = opened.state(), opened.document
        with pytest.raises(InvalidRequest, match="another vocabulary"):
            opened.check("another", WEIGHTS)
        with pytest.raises(InvalidRequest, match="other weights"):
            opened.check(MODEL, "others")
    units = stage.engine.states.unit_bytes
    for page_size, sizes, changed, complaint in (
        (8, units, state, "pages of 8 tokens"),
        (PAGE, units[:1], CopiedState(55, state.groups[:1]), "units of"),
        (PAGE, units, CopiedState(55, [state.groups[0][:-1], state.groups[1]]), "in \\[13, 1\\] units"),
        (PAGE, units, CopiedState(56, state.groups), "at most 55"),
        (PAGE, units, CopiedState(-1, state.groups), "at most 55"),
        (PAGE, units, CopiedState(0, state.groups), "in \\[0, 0\\] units"),
    ):
        refused(stage, tmp_path / "changed", document, page_size, sizes, changed, complaint)


def refused(
    stage: Stage,
    path: Path,
    document: SessionDocument,
    page_size: int,
    sizes: list[int],
    state: CopiedState,
    complaint: str,
) -> None:
    write_state_file(path, document, WEIGHTS, page_size, sizes, state)
    with pytest.raises(InvalidRequest, match=complaint):
        imported(stage, path)


def test_an_existing_file_is_replaced_whole_or_kept(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    with pytest.raises(TypeError), replacing(file) as partly:
        partly.writelines([b"a part", None])  # type: ignore[list-item]
    assert file.read_bytes() == content
    with replacing(file) as partly:
        partly.write(b"all of it")
    assert file.read_bytes() == b"all of it"
    assert list(file.parent.iterdir()) == [file]
    with pytest.raises(InvalidRequest, match="cannot be written"), replacing(tmp_path / "no" / "directory"):
        pass


def test_headers_of_any_length_are_distinguished_from_json() -> None:
    for length in (0x7B20, 0x227B, 8, 2**25):
        assert is_state_file(length.to_bytes(8, "little") + b'{"__meta')
    for start in (b'{"format": "s"', b'  {"format": "', b'\n\n\n\n\n\n\n\n{"format"'):
        assert not is_state_file(start)


@every_mix
def test_state_copied_in_several_pieces_is_put_in_the_right_place(mix, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tenuto.base.wire.state_file.PIECE", 1)
    path = exported(told(mix), "s", tmp_path / "file")
    there = Stage(mix)
    imported(there, path)
    assert goes_on(there, "s", 7, 8) == 55
