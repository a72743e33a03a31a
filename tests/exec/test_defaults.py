"""What computes says which options of engines suit it; what a user gives has precedence."""

import pytest

from tenuto.base.config import EngineConfig, EngineOptions, WorkerSettings, engine_config
from tenuto.base.errors import ConfigError
from tenuto.exec.device import ON_CUDA, engine_defaults
from tenuto.exec.witness import WitnessExecutor
from tenuto.runtime.models import load_model


def test_a_cuda_device_computes_longer_steps_of_more_turns_and_plans_ahead() -> None:
    assert engine_defaults("cuda") == ON_CUDA
    found = engine_config({}, defaults=engine_defaults("cuda"))
    assert (found.token_budget, found.mixed_budget, found.max_running, found.overlap) == (4096, 2048, 256, 1)
    assert engine_config({}, defaults=engine_defaults("cpu")) == EngineConfig()


def test_a_model_is_configured_by_its_executor_s_defaults_unless_others_are_given() -> None:
    model = load_model(WorkerSettings(model="witness"))
    general = model.configured({})
    assert (general.token_budget, general.mixed_budget, general.max_running, general.overlap) == (1024, 256, 32, 0)
    assert isinstance(model.executor, WitnessExecutor)
    model.executor.defaults = engine_defaults("cuda")  # as those of a model on a GPU
    given: EngineOptions = {"mixed_budget": 256, "overlap": 0}
    found = model.configured(given)
    assert (found.token_budget, found.mixed_budget, found.max_running, found.overlap) == (4096, 256, 256, 0)
    model.executor.close()


def test_a_small_token_budget_that_is_given_lowers_the_default_number_of_turns() -> None:
    assert engine_config({"token_budget": 100}, defaults=engine_defaults("cuda")).max_running == 99
    with pytest.raises(ConfigError, match="token_budget is 100"):
        engine_config({"token_budget": 100, "max_running": 100}, defaults=engine_defaults("cuda"))
