"""Command lines of SGLang's server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.base.errors import ConfigError
from tenuto.cli.sglang import check
from tests.serve.server import serving


def given(*arguments: str) -> Any:
    """Returns the context that keeps these arguments beside the known options."""
    return SimpleNamespace(args=list(arguments))


def test_flags_without_effect_here_are_accepted() -> None:
    flags = ("--enable-mixed-chunk", "--enable-metrics", "--disable-radix-cache", "--tp-size", "1", "--strict")
    tuning = ("--mamba-ssm-dtype", "float32", "--mamba-full-memory-ratio=0.5", "--audit-every", "7")
    with serving("--model-path", "witness", "--context-length", "512", *flags, *tuning) as server:
        with server.client() as http:
            config = http.get("/v1/engine").json()["config"]
            assert http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}}).is_success
        assert (config["prefix_cache"], config["audit_every"], config["strict"]) == (False, 7, True)
        assert any('"tenuto.audit"' in line for line in server.lines)


@pytest.mark.parametrize("wrong", [("--nonsense",), ("x",), ("--mamba-a=1", "x"), ("--mamba-a", "1", "2")])
def test_unknown_flags_are_refused(wrong: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="there is"):
        check(given(*wrong))
