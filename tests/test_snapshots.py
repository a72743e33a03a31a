"""The state of sessions leaves a real model in files, and another engine goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tenuto
from tenuto.base.errors import InvalidRequest
from tests.exec.kernels import needs_variant

HYBRID = str(Path(__file__).parent / "hybrid" / "model")
"""Full attention, a sliding window and recurrent state."""


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_model_goes_on_with_state_that_another_engine_has_left_or_exported(kernels: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "kernels": kernels,
        "context_length": 512,
        "prefix_cache": False,
        "journal": str(tmp_path / "journal"),
        "disk_tier": str(tmp_path / "tier"),
    }
    given = [20 + i % 50 for i in range(150)]
    with tenuto.Engine(HYBRID, **options) as engine:
        session = engine.session("s")
        session.turn(given, max_new_tokens=10, ignore_eos=True).result()
        fork = session.fork(session_id="fork")
        fork.append([30, 31])
        history, other = session.history, fork.history
        session.export_file(tmp_path / "file")
    with tenuto.Engine(HYBRID, kernels=kernels, context_length=512, prefix_cache=False) as engine:
        moved = engine.import_file(tmp_path / "file")
        elsewhere = moved.turn([40, 41, 42], max_new_tokens=12, ignore_eos=True)
        assert elsewhere.result().usage.cached == len(history) - 1
    with tenuto.Engine(HYBRID, **options) as engine:
        session, fork = engine.attach("s"), engine.attach("fork")
        assert (session.history, fork.history) == (history, other)
        assert session.info.computed == 0  # it is parked
        turns = [each.turn([40, 41, 42], max_new_tokens=12, ignore_eos=True) for each in (session, fork)]
        assert [turn.result().usage.cached for turn in turns] == [len(history) - 1, len(other) - 1]
        for turn, tokens in zip(turns, (history, other), strict=True):
            anew = engine.session()
            fresh = anew.turn([*tokens, 40, 41, 42], max_new_tokens=12, ignore_eos=True)
            assert fresh.result().usage.cached == 0
            assert fresh.token_ids == turn.token_ids
        assert elsewhere.token_ids == turns[0].token_ids
        engine.audit()


@needs_variant
def test_state_of_other_weights_or_kernels_is_refused(tmp_path: Path) -> None:
    with tenuto.Engine(HYBRID, kernels="torch") as engine:
        session = engine.session("s")
        session.append([20] * 40)
        session.export_file(tmp_path / "file")
    with tenuto.Engine(HYBRID) as engine, pytest.raises(InvalidRequest, match="other weights, or arranged"):
        engine.import_file(tmp_path / "file")
