"""The server's settings. Each comes from its flag, its variable, the file, or its default, in this order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tenuto.base.config import EngineConfig, WorkerSettings, variables
from tenuto.base.errors import ConfigError
from tenuto.cli.options import SERVER, read_flags
from tenuto.cli.tables import show_table
from tenuto.serve.shared.settings import ServeSettings

FILE = Path("tenuto.toml")
"""The settings file that is read, if it exists in the working directory, unless another is named."""
DEFAULT = "default"


class Setting(NamedTuple):
    """An option's value and its source: a flag, a variable, the path of a file, or `DEFAULT`."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All settings of a server. `origins` has every option's value and source, by option name."""

    worker: WorkerSettings
    serve: ServeSettings
    origins: Mapping[str, Setting]

    @staticmethod
    def resolve(
        flags: Mapping[str, Any], file: Path | None, options: Mapping[str, Any] = MappingProxyType({})
    ) -> ServerSettings:
        """Resolves the settings from the command line's `flags`, a program's `options` with values as in a file, the
        environment, and `file`. Every source is checked, even where another has precedence. Raises `ConfigError`."""
        origins = {name: Setting(option.declared.default, DEFAULT) for name, option in SERVER.items()}
        origins |= _from_file(file) | _from_variables() | _given(options, "options")
        origins |= {name: Setting(value, f"flag {SERVER[name].flag}") for name, value in read_flags(flags).items()}
        given = {name: value for name, (value, source) in origins.items() if source != DEFAULT}
        serve = ServeSettings(**_of(ServeSettings, given))
        config: Any = {**_of(EngineConfig, given), "tenant_weights": serve.tenants.weights}
        return ServerSettings(WorkerSettings(config=config, **_of(WorkerSettings, given)), serve, origins)

    @property
    def sources(self) -> list[str]:
        """The file and the variables that set options, to be shown at the start."""
        found = dict.fromkeys(source for _, source in self.origins.values())
        return [source for source in found if source != DEFAULT and not source.startswith("flag ")]

    def show(self) -> None:
        """Prints every option with its value, written as in the file, and its source. Secrets are masked."""
        secret = {name for name, option in SERVER.items() if option.declared.metadata["secret"]}
        rows = [
            [name, "********" if name in secret and value else _as_toml(value), source]
            for name, (value, source) in self.origins.items()
        ]
        show_table(["option", "value", "source"], rows)


def _of(settings: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values for fields of the dataclass `settings`."""
    return {each.name: given[each.name] for each in fields(settings) if each.name in given}


def _from_variables() -> dict[str, Setting]:
    options = {option.variable: name for name, option in SERVER.items()}
    given = variables()
    _check_known("there is no variable {name}", given, options)
    return {
        options[variable]: Setting(SERVER[options[variable]].read(text, f"variable {variable}"), f"variable {variable}")
        for variable, text in given.items()
    }


def _from_file(path: Path | None) -> dict[str, Setting]:
    try:
        if path is None and not FILE.exists():
            return {}
        path = (path or FILE).absolute()
        given = msgspec.toml.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the settings in {path or FILE} cannot be used: {error}") from error
    return _given(given, str(path))


def _given(values: Mapping[str, Any], source: str) -> dict[str, Setting]:
    _check_known(f"{source}: there is no option {{name!r}}", values, SERVER)
    return {name: Setting(SERVER[name].read(value, source, text=False), source) for name, value in values.items()}


def _check_known(problem: str, given: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    for name in given:
        if name not in allowed:
            raise ConfigError(f"{problem.format(name=name)}; allowed: {', '.join(sorted(allowed))}")


def _as_toml(value: Any) -> str:
    """Returns a value as it would be written in the file, or `none`."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
