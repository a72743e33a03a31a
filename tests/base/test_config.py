"""The configuration of an engine."""

from __future__ import annotations

import os
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest

from tenuto.base.config import (
    EngineConfig,
    EngineOptions,
    cache_dir,
    engine_config,
    lasting_cache_dir,
    trace_exporters,
    user_path,
)
from tenuto.base.errors import ConfigError


def test_every_field_of_the_configuration_can_be_set() -> None:
    assert [each.name for each in fields(EngineConfig)] == list(EngineOptions.__annotations__)


def test_the_context_defaults_to_the_models_and_cannot_exceed_it() -> None:
    assert engine_config({}, max_context=100).context_length == 100
    assert engine_config({}, max_context=2**20).context_length == EngineConfig().context_length
    assert engine_config({"context_length": 50}, max_context=100).context_length == 50
    with pytest.raises(ConfigError, match="allowed: at most the model's 100"):
        engine_config({"context_length": 101}, max_context=100)


def test_weights_are_accepted_as_pairs_of_any_kind_and_checked() -> None:
    assert engine_config({"tenant_weights": [["a", 2]]}).tenant_weights == (("a", 2),)  # type: ignore[typeddict-item]
    for wrong in ([["a"]], 3, [["a", 0]], [["a", "b"]], [["a", float("nan")]]):
        with pytest.raises(ConfigError, match="allowed"):
            engine_config({"tenant_weights": wrong})  # type: ignore[typeddict-item]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the system's temporary directory for this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_the_cache_is_where_the_environment_says_or_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir({}) == tmp_path / ".cache" / "tenuto"
    assert cache_dir({"XDG_CACHE_HOME": str(tmp_path / "x")}) == tmp_path / "x" / "tenuto"
    assert cache_dir({"XDG_CACHE_HOME": str(tmp_path / "x"), "TENUTO_CACHE": "~/own"}) == tmp_path / "own"
    assert list(tmp_path.iterdir()) == []


def test_without_a_writable_home_the_cache_is_a_private_temporary_directory(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = temporary / f"tenuto-{os.getuid()}"
    assert cache_dir({"XDG_CACHE_HOME": "/proc/1/nowhere"}) == expected  # no directory can be made there
    assert lasting_cache_dir({"XDG_CACHE_HOME": "/proc/1/nowhere"}) is None
    assert expected.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_dir({}) == expected


def test_a_temporary_cache_that_others_might_have_made_is_refused(temporary: Path) -> None:
    place, unwritable = temporary / f"tenuto-{os.getuid()}", {"XDG_CACHE_HOME": "/proc/1/nowhere"}
    place.symlink_to(temporary)
    with pytest.raises(ConfigError, match="not a directory of this user alone: set TENUTO_CACHE"):
        cache_dir(unwritable)
    place.unlink()
    place.mkdir()
    place.chmod(0o755)
    with pytest.raises(ConfigError, match="not a directory of this user alone"):
        cache_dir(unwritable)


def test_a_path_in_an_unknown_home_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert user_path("~/journal") == Path("/home/someone/journal")
    with pytest.raises(ConfigError, match=r"'~nobody-of-this-name/journal' begins with ~.*set HOME"):
        user_path("~nobody-of-this-name/journal")


@pytest.mark.parametrize(
    ("environ", "exporters"),
    [
        ({}, ()),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, ("otlp_proto_http",)),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            ("otlp_proto_grpc",),
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "True"}, ()),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ("console", "otlp_proto_http")),
    ],
)
def test_traces_are_exported_only_if_opentelemetry_s_variables_ask_for_it(
    environ: dict[str, str], exporters: tuple[str, ...]
) -> None:
    assert trace_exporters(environ) == exporters


def test_a_protocol_without_an_exporter_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; allowed: http/protobuf, grpc"):
        trace_exporters({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
