"""`tenuto journal` looks after a journal that no server has open."""

from __future__ import annotations

import json
from pathlib import Path

from tenuto.base.options import Policy
from tenuto.session.journal import Journal
from tests.cli.inside import run_inside
from tests.session.journals import SESSIONS, harmed_now, left_open, written
from tests.session.test_damaged_journals import HARMS
from tests.session.test_journal import Journaled


def test_a_sound_journal_is_checked_counted_and_compacted(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    saved = written(path)
    left_open.pop().close()
    checked = run_inside("journal", "check", str(path))
    assert checked.returncode == 0
    tokens = sum(len(each.tokens) for each in saved)
    assert checked.stdout.startswith(
        f"6 sessions, {sum(len(each.records) for each in saved)} turns and {tokens} tokens"
    )
    counted = run_inside("journal", "stat", str(path), "--json")
    assert json.loads(counted.stdout)["all"]["tokens"] == tokens
    compacted = json.loads(run_inside("journal", "compact", str(path), "--json").stdout)
    assert compacted["bytes"] == path.stat().st_size <= compacted["bytes_before"]
    assert json.loads(run_inside("journal", "check", str(path), "--json").stdout)["sound"]


def test_damage_is_named_and_sets_the_exit_status(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    harmed_now(path, HARMS["tokens"])
    found = run_inside("journal", "check", str(path))
    assert found.returncode == 1
    assert "1 sessions are damaged" in found.stdout
    assert SESSIONS[2] in found.stdout
    shown = run_inside("journal", "check", str(path), "--json")
    assert shown.returncode == 1
    assert [each["name"] for each in json.loads(shown.stdout)["damaged"]] == [SESSIONS[2]]
    refused = run_inside("journal", "compact", str(path))
    assert refused.returncode == 1
    assert "is damaged" in refused.stderr
    gone = run_inside("journal", "stat", str(tmp_path / "nothing"))
    assert (gone.returncode, gone.stdout) == (1, "")


def test_counts_are_shown_by_tenant(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    talk, journal = Journaled(), Journal(path, "tokens")
    for tenant, length in (("ann", 10), ("bob", 30)):
        talk.engine.sessions.open("s", Policy(tenant=tenant))
        talk.engine.sessions.adopt("s", [1] * length, [2], tenant=tenant)
    journal.write(talk.new_changes())
    journal.close()
    lines = run_inside("journal", "stat", str(path)).stdout.splitlines()
    assert "largest     s with 31 tokens, of bob" in lines
    assert [line.split()[:4] for line in lines[-2:]] == [["bob", "1", "1", "31"], ["ann", "1", "1", "11"]]
