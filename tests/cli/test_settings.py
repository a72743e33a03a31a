"""Settings of the server from the command line, the environment, a file and defaults, as shown by `--show-config`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import httpx
import pytest

from tenuto.base.config import KERNELS, EngineConfig, WorkerSettings, variables
from tenuto.base.errors import ConfigError
from tenuto.cli.options import SERVER
from tenuto.kernels.elements import Element, KVCacheDtype
from tenuto.kernels.native.build import VARIANTS
from tenuto.serve.shared.settings import ServeSettings
from tests.cli.inside import run_inside
from tests.cli.test_cli import run
from tests.serve.server import serving

CLASSES = (WorkerSettings, EngineConfig, ServeSettings)
NOT_OPTIONS = {"config": "it has the options of `EngineConfig`", "tenants": "they are read from `keys` and two keys"}
NOT_OPTIONS["fleet_secret"] = "it is read from `fleet_secret_file`"

Show = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def show(tmp_path: Path) -> Show:
    """Runs `tenuto serve --show-config` in an empty directory, with an optional file there and with variables."""

    def run_it(*flags: str, file: str | None = None, **given: str) -> subprocess.CompletedProcess[str]:
        if file is not None:
            (tmp_path / "tenuto.toml").write_text(file)
        return run_inside("serve", "--show-config", *flags, env=given, cwd=tmp_path)

    return run_it


def shown(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """Returns name -> (value, source) for every option."""
    assert (done.returncode, done.stderr) == (0, "")
    heading, *lines = done.stdout.splitlines()
    assert heading.split() == ["option", "value", "source"]
    rows = [re.split(r"  +", line) for line in lines]
    return {name: (value, source) for name, value, source in rows}


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the error, checked to be one line."""
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"tenuto: [^\n]*\n", done.stderr), done.stderr
    return done.stderr


def test_every_field_is_a_flag_a_variable_and_a_key_or_has_a_reason_not_to_be(show: Show) -> None:
    reasons = dict(NOT_OPTIONS)
    names = [each.name for one in CLASSES for each in fields(one)]
    for each in (each for one in CLASSES for each in fields(one) if each.metadata):
        assert each.metadata["description"]
        if each.metadata["internal"]:
            reasons[each.name] = each.metadata["internal"]
    assert sorted(names) == sorted({*SERVER, *reasons}), "a name is used twice, or is no option without a reason"
    assert set(reasons) == {"config", "tenants", "fleet_secret", "lookahead", "tenant_weights"}
    text = run("serve", "--help").stdout
    flags = re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)
    assert len(flags) == len(set(flags))
    assert set(flags) - {"--config", "--show-config", "--help"} == {option.flag for option in SERVER.values()}
    assert list(shown(show())) == list(SERVER)
    file = "\n".join(f"{name} = {value}" for name, (value, _) in shown(show()).items() if value != "none")
    for name, (value, source) in shown(show(file=file)).items():
        assert source.endswith("/tenuto.toml") == (value != "none"), name
    given = {option.variable: "" for option in SERVER.values()}
    assert shown(show(**given)) == shown(show()), "a variable that is empty counts as not set"


def test_every_option_is_read_from_its_variable(show: Show) -> None:
    defaults = {name: value for name, (value, _) in shown(show()).items() if value not in ("none", "[]", '""')}
    given = {SERVER[name].variable: value.strip('"') for name, value in defaults.items()}
    given |= {
        "TENUTO_ALLOWED_ORIGINS": "https://a.example",
        "TENUTO_SERVED_MODEL_NAME": "a, b",
        "TENUTO_VOLATILE_LINE": "x",
    }
    given |= {"TENUTO_DISK_TIER": "tier", "TENUTO_JOURNAL": "kept", "TENUTO_LORA_MODULES": "a=adapter"}
    given |= {"TENUTO_DTYPE": "bfloat16", "TENUTO_MEMORY": "0.5", "TENUTO_API_KEY": "k", "TENUTO_ADMIN_API_KEY": "a"}
    of_fleet = {"TENUTO_FLEET": "postgresql://db/fleet", "TENUTO_ADVERTISE": "http://10.0.0.1:8000"}
    assert shown(show(**of_fleet))["advertise"] == ('"http://10.0.0.1:8000"', "variable TENUTO_ADVERTISE")
    assert shown(show(**of_fleet))["fleet"] == ("********", "variable TENUTO_FLEET")
    shared = shown(show(**of_fleet, TENUTO_DISK_TIER="tier", TENUTO_SHARED_TIER="s3://bucket/prefix"))
    assert shared["shared_tier"] == ('"s3://bucket/prefix"', "variable TENUTO_SHARED_TIER")
    found = shown(show(**given))
    for name, (value, source) in found.items():
        if name not in ("keys", "fleet", "advertise", "fleet_secret_file", "shared_tier"):
            assert source == f"variable TENUTO_{name.upper()}"
            assert value == defaults.get(name, value)
    assert found["served_model_name"][0] == '["a", "b"]'
    assert (found["memory"][0], found["journal"][0]) == ("0.5", '"kept"')


def test_flags_override_variables_which_override_the_file_and_the_defaults(show: Show, tmp_path: Path) -> None:
    file = "port = 1\ntoken_budget = 2048\nstrict = true\nmax_sessions = 5\nhost_tier = '1GiB'\n"
    found = shown(show("--port", "3", "--no-strict", file=file, TENUTO_PORT="2", TENUTO_TOKEN_BUDGET="4096"))
    path = str(tmp_path / "tenuto.toml")
    assert found["port"] == ("3", "flag --port")
    assert found["strict"] == ("false", "flag --strict")
    assert found["token_budget"] == ("4096", "variable TENUTO_TOKEN_BUDGET")
    assert found["max_sessions"] == ("5", path)
    assert found["host_tier"] == (str(2**30), path)
    assert found["mixed_budget"] == ("256", "default")
    assert shown(show("--chunked-prefill-size", "99"))["token_budget"] == ("99", "flag --token-budget")
    assert shown(show("--disable-radix-cache"))["prefix_cache"] == ("false", "flag --prefix-cache")


def test_the_settings_file_can_be_chosen(show: Show, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("port = 7\nserved_model_name = ['a', 'b']\nsession_ttl = 'none'\n")
    found = shown(show("--config", "other.toml", file="port = 1\nstrict = true\n"))
    assert found["port"] == ("7", str(other))
    assert found["served_model_name"] == ('["a", "b"]', str(other))
    assert found["session_ttl"] == ("none", str(other))
    assert found["strict"] == ("false", "default")
    assert "nowhere.toml" in refused(show("--config", "nowhere.toml"))


def test_keys_are_masked(show: Show) -> None:
    done = show("--admin-api-key", "flagged", file="host = '0.0.0.0'\n", TENUTO_API_KEY="hidden")
    assert shown(done)["api_key"] == ("********", "variable TENUTO_API_KEY")
    assert shown(done)["admin_api_key"] == ("********", "flag --admin-api-key")
    assert "hidden" not in done.stdout
    assert "flagged" not in done.stdout
    assert "hidden" not in repr(ServeSettings(api_key="hidden"))
    assert "1234" not in refused(show(file="api_key = 1234\n"))


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("prot = 1\n", r"tenuto\.toml: there is no option 'prot'; allowed: .*, port, "),
        ("lookahead = 1\n", r"there is no option 'lookahead'"),
        ("chunked_prefill_size = 1024\n", r"there is no option 'chunked_prefill_size'; allowed: .*token_budget"),
        ("[engine]\noverlap = 1\n", r"there is no option 'engine'"),
        ("port = 'x'\n", r"tenuto\.toml: port is 'x'; allowed: a whole number from 0 to 65535"),
        ("port = '8000'\n", r"port is '8000'; allowed"),
        ("port = true\n", r"port is True; allowed"),
        ("port = 70000\n", r"tenuto\.toml: port is 70000; allowed: a whole number from 0 to 65535"),
        ("strict = 1\n", r"strict is 1; allowed: true or false"),
        ("host = 5\n", r"host is of type int; allowed: text"),
        ("served_model_name = 'a'\n", r"served_model_name is of type str; allowed: a list of texts"),
        ("served_model_name = [1]\n", r"served_model_name is of type list; allowed: a list of texts"),
        ("kernels = 'gpu'\n", r"kernels is 'gpu'; allowed: auto, amx, "),
        ("journal = 4\n", r"journal is 4; allowed: a path, or none"),
        ("memory = 'lots'\n", r"memory is 'lots'; allowed: .*4GiB"),
        ("disk_tier_size = '4'\nhost_tier = 'x'\n", r"host_tier is 'x'; allowed"),
        ("session_ttl = 'soon'\n", r"session_ttl is 'soon'; allowed"),
        ("max_running = 2000\n", r"token_budget is 1024; allowed: more than max_running \(2000\)"),
        ("host = '0.0.0.0'\n", r"API key"),
        ("keys = 'none.toml'\n", r"key file none\.toml cannot be used"),
        ("fleet = 'postgresql://db/x'\n", r"fleet and advertise are given alone; allowed: both, or neither"),
        ("advertise = 'http://db:1'\n", r"fleet and advertise are given alone"),
        ("fleet = 'x'\nadvertise = 'a:1'\n", r"advertise is 'a:1'; allowed: a URL such as"),
        ("fleet = 'x'\nadvertise = 'http://a:1'\njournal = 'j'\n", r"fleet and journal are given; allowed: one"),
        ("shared_tier = 's3://b/p'\n", r"shared_tier is given without fleet and disk_tier; allowed: with both"),
        ("shared_tier = 'ftp://b'\n", r"shared_tier is 'ftp://b'; allowed: s3://BUCKET/PREFIX, gs://.*, or none"),
        ("shared_tier = 's3://'\n", r"shared_tier is 's3://'; allowed"),
        ("shared_tier = 'file://tier'\n", r"shared_tier is 'file://tier'; allowed"),
        ("fleet_lease = 0.1\n", r"fleet_lease is 0\.1; allowed"),
        ("fleet_secret_file = 'no'\n", r"the file with the fleet's secret, no, cannot be used"),
        ("port = \n", r"tenuto\.toml cannot be used: .*line 1"),
    ],
)
def test_an_error_in_the_file_is_one_line_that_names_it(show: Show, file: str, error: str) -> None:
    assert re.search(error, refused(show(file=file)))


@pytest.mark.parametrize("url", ["s3://user:hidden@bucket/p", "s3://bucket/p?key=hidden", "s3://b#hidden", "hidden@b"])
def test_what_may_be_credentials_in_the_url_of_a_store_is_refused_and_not_shown(show: Show, url: str) -> None:
    error = refused(show(file=f"shared_tier = '{url}'\n"))
    assert re.search(r"shared_tier is a URL with a user, a query or a fragment; allowed: s3://", error)
    assert "hidden" not in error


def test_the_secret_of_a_fleet_is_a_line_that_can_be_sent(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    settings = ServeSettings(fleet_secret_file=str(path))
    assert settings.fleet_secret == "0123456789abcdef"
    assert "0123456789abcdef" not in repr(settings)
    for unfit in ("0123456789abcde", "two words of a secret", "a-secret-with-\N{LATIN SMALL LETTER E WITH ACUTE}", ""):
        path.write_text(unfit, encoding="utf-8")
        with pytest.raises(ConfigError, match="secret") as refusal:
            ServeSettings(fleet_secret_file=str(path))
        assert not unfit or unfit not in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"TENUTO_PROT": "1"}, r"there is no variable TENUTO_PROT; allowed: .*TENUTO_PORT"),
        ({"TENUTO_PORT": "tcp://10.0.0.1:80"}, r"variable TENUTO_PORT: port is 'tcp:.*; allowed: a whole number"),
        ({"TENUTO_STRICT": "perhaps"}, r"variable TENUTO_STRICT: strict is 'perhaps'; allowed: true or false"),
        ({"TENUTO_DRAIN_SECONDS": "nan"}, r"drain_seconds is nan; allowed: a number from 0 to"),
        ({"TENUTO_AGING_SECONDS": "0"}, r"aging_seconds is 0.0; allowed: more than 0"),
        ({"TENUTO_LOG_LEVEL": "loud"}, r"log_level is 'loud'; allowed: debug, info, warning, error"),
    ],
)
def test_an_error_in_a_variable_is_one_line_that_names_it(show: Show, given: dict[str, str], error: str) -> None:
    assert re.search(error, refused(show(**given)))


def test_an_error_is_reported_even_if_another_source_overrides_it(show: Show) -> None:
    assert "port is 'x'" in refused(show("--port", "1", file="port = 'x'\n"))
    assert "TENUTO_PORT: port" in refused(show("--port", "1", file="", TENUTO_PORT="x"))
    assert "flag --port: port is 'x'; allowed: a whole number" in refused(show("--port", "x"))


def test_variables_of_other_programs_are_ignored(show: Show) -> None:
    given = {"TENUTO_CACHE": "somewhere", "TENUTO_URL": "http://127.0.0.1:1", "OTHER": "x", "TENUTO_HOST": ""}
    assert variables(given) == {}
    assert {source for _, source in shown(show(**given)).values()} == {"default"}


def test_a_server_runs_with_the_settings_and_names_their_sources(tmp_path: Path) -> None:
    file = tmp_path / "named.toml"
    file.write_text("model = 'witness'\nserved_model_name = ['a']\n")
    with serving("--config", str(file), "--token-budget", "99", env={"TENUTO_MAX_SESSIONS": "7"}) as server:
        config = httpx.get(f"{server.url}/v1/engine", timeout=60).json()["config"]
        assert httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"] == "a"
    assert (config["max_sessions"], config["token_budget"]) == (7, 99)
    assert f"settings   {file}, variable TENUTO_MAX_SESSIONS\n" in server.lines


def test_choices_equal_those_of_the_code_that_uses_them() -> None:
    choices = {name: option.declared.metadata["allowed"] for name, option in SERVER.items()}
    assert choices["dtype"] == tuple(Element)
    assert choices["kv_cache_dtype"] == tuple(KVCacheDtype)
    assert choices["kernels"] == ("auto", *VARIANTS, "torch") == KERNELS


@pytest.mark.parametrize("given", ["INFO", "Info"])
def test_a_choice_may_be_written_in_capitals(given: str) -> None:
    assert WorkerSettings(log_level=given).log_level == "info"
    with pytest.raises(ConfigError, match="log_level is 'loud'; allowed: debug, info, warning, error"):
        WorkerSettings(log_level="loud")
