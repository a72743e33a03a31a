"""Command-line parameters, built from the options that dataclasses declare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import typer

from tenuto.base.checks import MAX_SECONDS, Bounds, check_option
from tenuto.base.config import EngineConfig, WorkerSettings
from tenuto.base.errors import ConfigError
from tenuto.base.options import TurnParams
from tenuto.base.parsing import parse_directory, parse_memory, parse_path, parse_size, parse_ttl
from tenuto.base.sampling import Sampling
from tenuto.serve.shared.settings import ServeSettings

C = TypeVar("C", bound=Callable[..., None])

_KINDS = {bool: (bool, None), int: (str, "<int>"), float: (str, "<float>"), tuple: (list[str], "<list[str]>")}
"""Type and metavar of a flag in Typer, by the option's type. Options of other types are text."""
_VALUES = {
    parse_memory: "SIZE",
    parse_size: "SIZE",
    parse_path: "PATH",
    parse_directory: "PATH",
    parse_ttl: "SECONDS",
}


@dataclass(frozen=True, slots=True)
class Option:
    """An option that users set by flag, variable or file. `declared` is its field in a dataclass, `hint` its type."""

    declared: Field[Any]
    hint: Any

    @property
    def flag(self) -> str:
        return "--" + self.declared.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The name of its environment variable."""
        return "TENUTO_" + self.declared.name.upper()

    @property
    def kind(self) -> type[Any]:
        """The option's type without type arguments and without `None`."""
        return tuple if get_origin(self.hint) is tuple else (get_args(self.hint) or (self.hint,))[0]

    def read(self, given: Any, source: str, *, text: bool = True) -> Any:
        """Converts what `source` gives, text or with `text=False` a TOML value, to the option's value. Raises
        `ConfigError` with `source` in its message."""
        name, value, expected = self.declared.name, given, True
        if not callable(self.declared.metadata["allowed"]):
            if self.kind is tuple and text and isinstance(given, str):
                value = [each.strip() for each in given.split(",")]
            try:
                value = msgspec.convert(value, self.hint, strict=not text)
            except msgspec.ValidationError:
                expected = False
        try:
            value = check_option(self.declared, value, ConfigError)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        if not expected:
            allowed = "a list of texts" if self.kind is tuple else "text"
            raise ConfigError(f"{source}: {name} is of type {type(given).__name__}; allowed: {allowed}")
        return value

    def parameter(self, description: str | None = None) -> inspect.Parameter:
        """Returns the Typer parameter, whose value is `None` without a flag. `description` replaces the option's
        own."""
        given, default = self.declared.metadata, self.declared.default
        kind, metavar = _KINDS.get(self.kind, (str, "<str>"))
        flag = f"{self.flag}/--no-{self.flag[2:]}" if kind is bool else self.flag
        shown = [f"default: {_default(self.flag, default)}"] if default not in (None, "", ()) else []
        shown += [_range(given["allowed"])] if isinstance(given["allowed"], Bounds) else []
        shown += ["one of " + ", ".join(given["allowed"])] if isinstance(given["allowed"], tuple) else []
        notes = f"  [{'; '.join(shown)}]" if shown else ""
        made = typer.Option(
            None,
            flag,
            *given["names"].get("cli", ()),
            metavar=_VALUES.get(given["allowed"], metavar),
            help=(description or given["description"]) + notes,
            show_default=False,
        )
        return inspect.Parameter(
            self.declared.name, inspect.Parameter.KEYWORD_ONLY, default=made, annotation=kind | None
        )


def declared(*classes: type[Any]) -> dict[str, Option]:
    """Returns the options of dataclasses by name, except those that users cannot set."""
    return {
        each.name: Option(each, get_type_hints(one)[each.name])
        for one in classes
        for each in fields(one)
        if each.metadata and not each.metadata["internal"]
    }


SERVER = declared(WorkerSettings, EngineConfig, ServeSettings)
"""The options of `tenuto serve`."""
ALL = declared(Sampling, TurnParams) | SERVER


def with_options(*names: str, **descriptions: str) -> Callable[[C], C]:
    """Returns a decorator that adds the options in `names` to a command, and those in `descriptions` with another
    description. The command receives their values in `**given`, for `read_flags`."""

    def add(command: C) -> C:
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [ALL[name].parameter(descriptions.get(name)) for name in (*names, *descriptions)]
        parameters += [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own if each.kind is not each.VAR_KEYWORD
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # Typer reads it
        return command

    return add


def read_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the options given on the command line. Raises `ConfigError`."""
    return {name: ALL[name].read(value, f"flag {ALL[name].flag}") for name, value in given.items() if value is not None}


def _default(flag: str, default: Any) -> str:
    return (flag[2:] if default else f"no-{flag[2:]}") if isinstance(default, bool) else _number(default)


def _range(bounds: Bounds) -> str:
    """Formats a range for help; omits an upper bound that only guards against absurd values."""
    low, high, below = _number(bounds.low), _number(bounds.high), "<" if bounds.above else "<="
    return f"{low}{below}x<={high}" if bounds.high < MAX_SECONDS else f"x{below.replace('<', '>')}{low}"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
