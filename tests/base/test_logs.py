"""Structured logs: one JSON object a line, with fields, from every process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from tenuto.base.config import WorkerSettings
from tenuto.base.errors import ConfigError
from tenuto.serve.engine_process import EngineProcess
from tenuto.serve.process import ProcessLink


def lines(written: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in written.splitlines()]


def test_records_of_the_standard_library_keep_their_fields() -> None:
    code = """
import logging
from tenuto.base.logs import configure_logs
configure_logs("warning", as_json=True)
log = logging.getLogger("tenuto.engine")
log.info("not of interest")
log.warning("a step failed", extra={"step": 7, "turns": ["turn 1 of s"]})
"""
    written = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    (line,) = lines(written)
    del line["timestamp"]
    assert line == {
        "event": "a step failed",
        "logger": "tenuto.engine",
        "level": "warning",
        "step": 7,
        "turns": ["turn 1 of s"],
    }


async def started(settings: WorkerSettings) -> None:
    link = await ProcessLink.open(EngineProcess(settings))
    await link.close()


def test_an_engine_process_logs_in_the_same_structure(capfd: pytest.CaptureFixture[str]) -> None:
    asyncio.run(started(WorkerSettings(model="witness")))
    (line,) = lines(capfd.readouterr().err)
    assert (line["event"], line["model"], line["level"]) == ("engine started", "witness", "info")
    asyncio.run(started(WorkerSettings(model="witness", log_level="warning")))
    assert lines(capfd.readouterr().err) == []


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="log_level"):
        asyncio.run(started(WorkerSettings(model="witness", log_level="loud")))
