"""A service begins with the sessions of its journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenuto.base.config import WorkerSettings
from tenuto.base.errors import ConfigError
from tenuto.runtime.models import load_model
from tenuto.runtime.opening import open_service
from tenuto.session.journal import Journal
from tests.session.journals import harmed_now, left_open
from tests.session.test_journal import Journaled


def test_damage_is_named_even_if_a_session_does_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = WorkerSettings(model="witness", journal=str(tmp_path / "journal"), config={"context_length": 100})
    path = tmp_path / "journal"
    talk, journal = Journaled(), Journal(path, load_model(settings).fingerprint)
    for name in ("damaged", "long"):
        talk.engine.sessions.open(name)
        talk.engine.sessions.adopt(name, [1] * 500, [2])
    journal.write(talk.new_changes())
    left_open.append(journal)
    harmed_now(path, "DELETE FROM records WHERE session = 1")
    with pytest.raises(ConfigError, match=r"'long' of .* does not fit here"):
        open_service(settings, lambda _: None)
    assert "a damaged session was set aside" in caplog.text
    assert (tmp_path / "journal.damaged-1").exists()
