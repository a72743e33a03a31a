"""How an engine is told to run."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tenuto.base.config import EngineConfig, EngineOptions, engine_config
from tenuto.base.errors import ConfigError


def test_every_field_of_the_configuration_may_be_given() -> None:
    assert [each.name for each in fields(EngineConfig)] == list(EngineOptions.__annotations__)


def test_the_context_is_the_models_if_that_is_less_and_nothing_else_is_given() -> None:
    assert engine_config({}, max_context=100).context_length == 100
    assert engine_config({}, max_context=2**20).context_length == EngineConfig().context_length
    assert engine_config({"context_length": 50}, max_context=100).context_length == 50
    with pytest.raises(ConfigError, match="allowed: at most the model's 100"):
        engine_config({"context_length": 101}, max_context=100)


def test_weights_may_be_pairs_of_any_kind_and_are_checked() -> None:
    assert engine_config({"tenant_weights": [["a", 2]]}).tenant_weights == (("a", 2),)  # type: ignore[typeddict-item]
    for wrong in ([["a"]], 3, [["a", 0]], [["a", "b"]], [["a", float("nan")]]):
        with pytest.raises(ConfigError, match="allowed"):
            engine_config({"tenant_weights": wrong})  # type: ignore[typeddict-item]
