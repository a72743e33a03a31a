"""The state of sessions leaves a real model in files, and another engine continues with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tenuto
from tenuto.base.errors import InvalidRequest
from tenuto.memory.tiers.rates import Rates
from tests.exec.kernels import KERNELS, every_variant, needs_variant

HYBRID = str(Path(__file__).parent / "hybrid" / "model")
"""Has full attention, a sliding window and recurrent state."""


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kept_as", ["auto", "int8"])
def test_a_model_continues_with_state_that_another_engine_left_or_exported(
    kernels: str, kept_as: str, tmp_path: Path
) -> None:
    if (kernels, kept_as) == ("torch", "int8"):
        pytest.skip("PyTorch keeps no bytes")
    own: dict[str, Any] = {"kernels": kernels, "kv_cache_dtype": kept_as}
    options: dict[str, Any] = {
        **own,
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
    with tenuto.Engine(HYBRID, context_length=512, prefix_cache=False, **own) as engine:
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
@pytest.mark.parametrize("options", [{"kernels": "torch"}, {"kv_cache_dtype": "int8"}])
def test_state_of_other_weights_or_kernels_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with tenuto.Engine(HYBRID, **options) as engine:
        session = engine.session("s")
        session.append([20] * 40)
        session.export_file(tmp_path / "file")
    with tenuto.Engine(HYBRID) as engine, pytest.raises(InvalidRequest, match="other weights or laid out"):
        engine.import_file(tmp_path / "file")


@needs_variant
def test_a_snapshot_with_another_type_of_keys_and_values_is_left_alone_and_recomputed(
    tmp_path: Path,
) -> None:
    kept: dict[str, Any] = {"journal": str(tmp_path / "journal"), "disk_tier": str(tmp_path / "tier")}
    with tenuto.Engine(HYBRID, kv_cache_dtype="int8", **kept) as engine:
        engine.session("s").turn([20 + i % 50 for i in range(150)], max_new_tokens=10, ignore_eos=True).result()
    with tenuto.Engine(HYBRID, **kept) as engine:
        turn = engine.attach("s").turn([40], max_new_tokens=2, ignore_eos=True)
        assert turn.result().usage.cached == 0


@every_variant
def test_sessions_in_8_bits_fork_rewind_abort_and_leave_the_device_like_those_in_16(
    variant: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After all of that, their next output equals the output from scratch. Memory is short, and idle sessions yield
    to host memory; they are restored even where recomputing so small a model would be faster."""
    monkeypatch.setattr(Rates, "worth", lambda *_: True)
    given = [20 + i % 50 for i in range(200)]
    with tenuto.Engine(
        HYBRID,
        kernels=variant,
        kv_cache_dtype="int8",
        context_length=512,
        prefix_cache=False,
        host_tier=2**26,
        max_running=4,
        memory_bytes=2**21,
    ) as engine:
        session = engine.session("s")
        session.turn(given, max_new_tokens=12, ignore_eos=True).result()
        fork = session.fork(session_id="fork")
        fork.turn([30, 31], max_new_tokens=6, ignore_eos=True).result()
        session.turn([33] * 5, max_new_tokens=9, ignore_eos=True).result()
        session.rewind(turn=1)
        aborted = session.turn([34] * 40, max_new_tokens=200, ignore_eos=True)
        aborted.abort()
        for i in range(12):  # others take the device
            engine.session(f"other {i}").turn([50 + i] * 150, max_new_tokens=2, ignore_eos=True).result()
        for each in (session, fork):
            history = each.history
            assert each.info.computed == 0  # it is parked
            turn = each.turn([40, 41], max_new_tokens=12, ignore_eos=True)
            assert turn.result().usage.cached > 150
            anew = engine.session().turn([*history, 40, 41], max_new_tokens=12, ignore_eos=True)
            assert anew.result().usage.cached == 0
            assert anew.token_ids == turn.token_ids
        engine.audit()
